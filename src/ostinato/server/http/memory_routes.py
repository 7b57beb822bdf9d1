"""Memory and pause under SGLang's names."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from ..service import Service
from ..sglang.requests import AbortRequest, ContinueRequest, MemoryRequest, PauseRequest
from .api_document import answers
from .engine_calls import engine_call
from .json_answers import json_response
from .known_query import admin_router

_TAGS = {"cuda_graph": "graphs"}
"""What SGLang calls differently."""
_MODES = {"abort": ("abort", False), "retract": ("keep", True), "in_place": ("keep", False)}
"""What each mode is here: what becomes of requests, and whether they are computed again."""


def memory_routes(service: Service) -> APIRouter:
    """The routes; a GET is as good as a POST where SGLang has both."""
    routes = admin_router()

    @routes.get("/release_memory_occupation", include_in_schema=False)
    @routes.post("/release_memory_occupation", responses=answers())
    async def release_memory_occupation(body: MemoryRequest | None = None) -> Response:
        """Give memory back, all or of these tags. Weights go to the host; requests go on afterwards."""
        return json_response(await engine_call(service, "release_memory", tags=_tags(body)))

    @routes.get("/resume_memory_occupation", include_in_schema=False)
    @routes.post("/resume_memory_occupation", responses=answers())
    async def resume_memory_occupation(body: MemoryRequest | None = None) -> Response:
        """Take memory back, all or of these tags."""
        return json_response(await engine_call(service, "resume_memory", tags=_tags(body)))

    @routes.post("/pause_generation", responses=answers())
    async def pause_generation(body: PauseRequest | None = None) -> Response:
        """Take no step until /continue_generation; new requests wait. Those under way end (mode abort), are
        computed again afterwards (retract), or go on where they were (in_place)."""
        mode, clear_cache = _MODES[(body or PauseRequest()).mode]
        await engine_call(service, "pause", mode=mode, clear_cache=clear_cache)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    @routes.post("/continue_generation", responses=answers())
    async def continue_generation(body: ContinueRequest | None = None) -> Response:
        """Go on after a pause."""
        await engine_call(service, "resume")
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    @routes.get("/flush_cache", include_in_schema=False)
    @routes.post("/flush_cache", responses=answers())
    async def flush_cache(timeout: Annotated[float, Query(ge=0, le=86400)] = 0.0) -> Response:
        """Forget all cached prefixes; 400 if requests run or wait, after waiting so long for their end."""
        return json_response(await engine_call(service, "flush_cache", timeout=timeout))

    @routes.post("/abort_request", responses=answers())
    async def abort_request(body: AbortRequest) -> Response:
        """End requests whose id begins so, or all; also if there are none."""
        service.serving()
        chosen = [
            each
            for each in service.generations.values()
            if body.abort_all or (body.rid and each.id.startswith(body.rid))
        ]
        for generation in chosen:
            generation.abort()
        return json_response({"aborted": [generation.id for generation in chosen]})

    return routes


def _tags(body: MemoryRequest | None) -> list[str] | None:
    if body is None or not body.tags:
        return None
    return [_TAGS.get(tag, tag) for tag in body.tags]
