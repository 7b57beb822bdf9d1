"""Counts answers by endpoint and status."""

from __future__ import annotations

from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Answers:
    """How many there were. Paths that do not exist count as one, so that nobody can make up series."""

    def __init__(self, counts: Counter[tuple[str, int]], paths: frozenset[str]) -> None:
        self._counts = counts
        self._paths = paths

    def count(self, path: str, status: int) -> None:
        """Counts one."""
        self._counts[path if path in self._paths else "other", status] += 1


class AnswerCount:
    """Outermost middleware."""

    def __init__(self, app: ASGIApp, answers: Answers) -> None:
        self._app = app
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and see what comes back."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answers.count(scope["path"], message["status"])
            await send(message)

        await self._app(scope, receive, counted)
