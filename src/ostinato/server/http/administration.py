"""The admin endpoints. Who may call them is decided in `keys`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from ..openai.errors import ApiError
from ..openai.requests import AbortRequest
from ..service import Service
from .api_document import answers
from .engine_calls import engine_call
from .json_answers import json_response
from .known_query import admin_router


def admin_routes(service: Service) -> APIRouter:
    """The routes for whoever runs the server."""
    routes = admin_router()

    async def call(name: str, **payload: Any) -> Response:
        return json_response(await engine_call(service, name, **payload))

    @routes.get("/graphs", responses=answers())
    async def graphs() -> Response:
        """The graphs, their replays, eager steps by reason, memory."""
        return await call("graphs")

    @routes.post("/start_profile", responses=answers())
    async def start_profile() -> Response:
        """Begin a torch profile of the engine."""
        folder = Path(service.config.profile_dir).absolute()
        return await call("start_profile", file=str(folder / f"{time.strftime('%Y%m%d-%H%M%S')}.json.gz"))

    @routes.post("/stop_profile", responses=answers())
    async def stop_profile() -> Response:
        """End the profile and write it; the answer has its file."""
        return await call("stop_profile")

    @routes.post("/abort", responses=answers())
    async def abort(body: AbortRequest) -> Response:
        """End requests; their clients get what there is, with finish reason `abort`."""
        service.serving()
        if (body.request_id is None) != body.all:
            raise ApiError(400, "give request_id, or all as true", param="request_id")
        generations = service.generations
        if body.request_id is not None and body.request_id not in generations:
            raise ApiError(404, f"no request {body.request_id!r} is under way", param="request_id")
        chosen = list(generations.values()) if body.request_id is None else [generations[body.request_id]]
        for generation in chosen:
            generation.abort()
        return json_response({"aborted": [generation.id for generation in chosen]})

    return routes
