"""Requests that are cut off when the server leaves are told so, if they have heard nothing yet."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..openai.errors import unavailable
from .json_answers import error_response


class LastAnswer:
    """Outermost middleware: a cancelled request is one that the server has no more time for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 503."""
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if scope["type"] == "http" and not has_begun:
                error = unavailable("the server is shutting down")
                error.headers["Connection"] = "close"
                await error_response(error)(scope, receive, send)
