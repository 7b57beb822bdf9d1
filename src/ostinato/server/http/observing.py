"""Endpoints for probes, scrapers and the page."""

from __future__ import annotations

import asyncio
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from ostinato import __version__
from ostinato.engine.parameters.sampling_params import SamplingParams

from ..metrics.exposition import ServerCollector, registry_of
from ..metrics.live import LiveStatistics
from ..openai.completion import Completion
from ..openai.errors import ApiError, unavailable
from ..openai.generation import ClientGone
from ..service import Service
from .api_document import answers
from .client_watch import ClientWatch
from .json_answers import json_response
from .probes import WrittenMetrics

PROBE_SECONDS = 30.0
"""An engine that takes longer for one token is not healthy."""


def observing_routes(service: Service) -> APIRouter:
    """The routes that show what the server does."""
    routes = APIRouter()
    written = WrittenMetrics(registry_of(ServerCollector(service)))
    live = LiveStatistics(service)
    page = files("ostinato.server.page").joinpath("index.html").read_bytes()

    @routes.get("/", include_in_schema=False)
    async def index() -> Response:
        """The live page."""
        policy = "default-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
        headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    @routes.get("/ping", include_in_schema=False)
    @routes.post("/ping", include_in_schema=False)
    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", responses=answers())
    async def health() -> Response:
        """200 while requests are served."""
        healthy, state = service.health
        if not healthy:
            detail = f" ({service.engine.progress})" if state == "loading" else ""
            raise unavailable(f"the server is {state}{detail}")
        return json_response({"status": state})

    @routes.get("/health_generate", responses=answers())
    async def health_generate(request: Request) -> Response:
        """200 if the engine generates a token now."""
        model = service.serving()
        if not model.ready.can_generate:
            raise ApiError(400, "this model embeds only: use /health")
        if (why := service.engine.standing.why_no_step) is not None:
            raise unavailable(f"no token is generated now: {why}")
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        generation = service.generation(service.answer_id("health"), [Completion(0, [0], params, model)])
        try:
            async with ClientWatch(request.receive, lambda: generation.end(ClientGone())):
                await asyncio.wait_for(generation.finished(), PROBE_SECONDS)
        except TimeoutError:
            raise unavailable(f"the engine made no token within {PROBE_SECONDS:g} s") from None
        finally:
            generation.end()
        return json_response({"status": "ready"})

    @routes.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(written.text(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/stats", responses=answers())
    async def stats(after: int | None = None) -> Response:
        """What the page shows, as JSON; with the seconds behind sample `after`, -1 for all that are kept."""
        return json_response(live.snapshot(after))

    @routes.get("/version", responses=answers())
    async def version() -> Response:
        """The server's version."""
        found: dict[str, Any] = {"version": __version__}
        return json_response(found)

    return routes
