"""Sleep and pause under vLLM's names: the endpoints that it has with VLLM_SERVER_DEV_MODE, and Ray's."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from ..openai.generation import Generation
from ..openai.requests import AbortRequests, SleepRequest, WakeRequest
from ..service import Service
from .api_document import answers
from .engine_calls import engine_call
from .json_answers import json_response
from .known_query import admin_router


def sleep_routes(service: Service) -> APIRouter:
    """The routes; what they answer is vLLM's, and where that is empty, what was done."""
    routes = admin_router()

    @routes.post("/sleep", responses=answers())
    async def sleep(
        level: int | None = None, mode: str | None = None, body: SleepRequest | None = None
    ) -> Response:
        """Give memory back. Level 0: take no steps; 1: weights go to the host; 2: they are dropped. What is
        under way ends (mode abort), is served to its end before (wait), or goes on afterwards (keep)."""
        service.serving(None if body is None else body.model)
        if body is not None and body.options is not None:
            level = body.options.level if level is None else level
            mode = mode or body.options.mode
        level = 1 if level is None else level
        return json_response(await engine_call(service, "sleep", level=level, mode=mode or "abort"))

    @routes.post("/wakeup", include_in_schema=False)
    @routes.post("/wake_up", responses=answers())
    async def wake_up(
        tags: Annotated[list[str] | None, Query()] = None, body: WakeRequest | None = None
    ) -> Response:
        """Take memory back, all or of these tags; when all of it is there, steps go on."""
        service.serving(None if body is None else body.model)
        if not tags and body is not None and body.options is not None:
            tags = body.options.tags
        return json_response(await engine_call(service, "wake_up", tags=tags or None))

    @routes.post("/is_sleeping", include_in_schema=False)
    @routes.get("/is_sleeping", responses=answers())
    async def is_sleeping() -> Response:
        """Whether some memory is away, or steps are held by a sleep."""
        service.serving()
        return json_response({"is_sleeping": service.engine.standing.is_sleeping})

    @routes.post("/pause", responses=answers())
    async def pause(
        mode: str = "abort", clear_cache: bool = True, wait_for_inflight_requests: bool = False
    ) -> Response:
        """Take no step until /resume; new requests wait. Modes as for /sleep. With `clear_cache`, requests
        that go on afterwards are computed again."""
        chosen = "wait" if wait_for_inflight_requests else mode
        await engine_call(service, "pause", mode=chosen, clear_cache=clear_cache)
        return json_response({"status": "paused"})

    @routes.post("/resume", responses=answers())
    async def resume() -> Response:
        """Go on after a pause."""
        await engine_call(service, "resume")
        return json_response({"status": "resumed"})

    @routes.get("/is_paused", responses=answers())
    async def is_paused() -> Response:
        """Whether no step is taken, by a pause or a sleep."""
        service.serving()
        return json_response({"is_paused": service.engine.standing.is_paused})

    @routes.post("/abort_requests", responses=answers())
    async def abort_requests(body: AbortRequests | None = None) -> Response:
        """End requests by the ids of their answers, or by their X-Request-Id; without any, all."""
        service.serving()
        ids = set(body.request_ids or ()) if body is not None else set()
        chosen = [each for each in service.generations.values() if not ids or _names(each) & ids]
        for generation in chosen:
            generation.abort()
        return json_response({"status": "aborted", "aborted": len(chosen)})

    @routes.post("/reset_prefix_cache", responses=answers())
    async def reset_prefix_cache(
        reset_running_requests: bool = False, reset_external: bool = False, body: WakeRequest | None = None
    ) -> Response:
        """Forget all cached prefixes; requests under way keep theirs, unless they are to be computed again.
        There are no caches elsewhere to be forgotten as well."""
        return json_response(await engine_call(service, "reset_prefix_cache", running=reset_running_requests))

    @routes.post("/reset_encoder_cache", responses=answers())
    @routes.post("/reset_mm_cache", responses=answers())
    async def reset_nothing() -> Response:
        """There is no such cache, so it is empty."""
        service.serving()
        return json_response({})

    @routes.get("/get_world_size", responses=answers())
    async def get_world_size(include_dp: bool = True) -> Response:
        """How many processes compute: one."""
        service.serving()
        return json_response({"world_size": 1})

    return routes


def _names(generation: Generation) -> set[str]:
    return {generation.id, generation.id.partition("-")[2]}
