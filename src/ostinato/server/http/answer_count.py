"""Counts answers by endpoint and status."""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class AnswerCount:
    """Outermost middleware. Paths that do not exist count as one, so that nobody can make up series."""

    def __init__(self, app: ASGIApp, counts: Counter[tuple[str, int]], paths: frozenset[str]) -> None:
        self._app = app
        self._counts = counts
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and see what comes back."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts[path, message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted)
