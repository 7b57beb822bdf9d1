"""Probes and scrapers: a port of their own, and metrics that are written at most a few times a second."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send

from ..openai.errors import ApiError
from .json_answers import error_response

PROBE_PATHS = frozenset({"/health", "/ping", "/metrics", "/version"})
PROBE_CONNECTIONS = 64
PROBE_SECONDS = 5.0
"""That a prober may take for a request."""
METRICS_SECONDS = 0.25
"""For which written metrics are good; scrapers come every few seconds."""


class ProbesOnly:
    """The application as its second port shows it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes probes on; 404 for everything else."""
        if scope["type"] == "http" and scope["path"].rstrip("/") not in PROBE_PATHS:
            error = ApiError(404, "this port answers probes only", code="not_found")
            error.headers["Connection"] = "close"  # nobody has read a body
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


class WrittenMetrics:
    """The metrics as text, written when they are older than `METRICS_SECONDS`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._text = b""
        self._since = -METRICS_SECONDS

    def text(self) -> bytes:
        """Returns the metrics as of now, or of a moment ago."""
        if (now := time.monotonic()) - self._since >= METRICS_SECONDS:
            self._text, self._since = generate_latest(self._registry), now
        return self._text
