"""A line for each request that was answered with an error: its reason, and an id that its client has too."""

from __future__ import annotations

from secrets import token_hex

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..log_lines import LimitedLines
from ..openai.errors import ErrorBody

_PROBES = frozenset({"/health", "/health_generate", "/ping"})
"""Asked every second while a server starts; that it is not ready is no news."""

_read = msgspec.json.Decoder(ErrorBody).decode


class RefusalLog:
    """Middleware in front of everything that refuses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._lines = LimitedLines("requests were refused")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and see what comes back."""
        if scope["type"] != "http" or scope["path"] in _PROBES:
            await self._app(scope, receive, send)
            return
        refused: tuple[int, str] | None = None

        async def watched(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and _is_refusal(message["status"]):
                headers = MutableHeaders(scope=message)
                # One that was under way has an id, and was logged as aborted.
                if "x-request-id" not in headers:
                    headers["X-Request-Id"] = f"req-{token_hex(16)}"
                    refused = message["status"], headers["X-Request-Id"]
            elif message["type"] == "http.response.body" and refused is not None:
                (status, name), refused = refused, None
                request = f"{scope['method']} {_one_line(scope['path'])}"
                self._lines.say(f"{name} refused: {request} {status}: {_reason(message['body'])}")
            await send(message)

        await self._app(scope, receive, watched)


def _is_refusal(status: int) -> bool:
    return status >= 400 and status != 499


def _reason(body: bytes) -> str:
    try:
        text = _read(body).error.message
    except msgspec.MsgspecError:
        text = body[:200].decode(errors="replace")
    return _one_line(" ".join(text[:500].split()))


def _one_line(text: str) -> str:
    """Clients choose parts of it: no line of theirs shall look like one of ours."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:500])
