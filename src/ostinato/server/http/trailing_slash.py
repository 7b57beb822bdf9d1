"""Paths with a slash too many at their end are those without it, but for two of TRL's."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

KEPT = frozenset({"/generate/", "/reset_prefix_cache/"})
"""TRL's; without their slash SGLang's and vLLM's."""


class TrailingSlash:
    """Middleware before everything that looks at paths; a redirect would be followed without its body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on without the slash."""
        if scope["type"] == "http" and (path := without_slash(scope["path"])) != scope["path"]:
            scope = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(scope, receive, send)


def without_slash(path: str) -> str:
    """Returns the path as routes have it."""
    return path.rstrip("/") or "/" if path.endswith("/") and path not in KEPT else path
