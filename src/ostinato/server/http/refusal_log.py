"""Lines about requests: each that was answered with an error, with its reason and an id that its client has
too, and each that changed something as an admin."""

from __future__ import annotations

import time
from secrets import token_hex

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..log_lines import LimitedLines, say
from ..openai.errors import ErrorBody
from ..tenants.tenant import current_tenant
from .keys import ADMIN_PATHS

_PROBES = frozenset({"/health", "/health_generate", "/ping"})
"""Asked every second while a server starts; that it is not ready is no news."""

_read = msgspec.json.Decoder(ErrorBody).decode


class RefusalLines:
    """What is said about refused requests, at most so many lines a second."""

    def __init__(self) -> None:
        self._lines = LimitedLines("requests were refused")

    def say(self, name: str, method: str, path: str, status: int, body: bytes) -> None:
        """A line, unless there were too many in this second. `body`: the answer's."""
        self._lines.say(lambda: f"{name} refused: {method} {_one_line(path)} {status}: {_reason(body)}")


def refusal_id() -> str:
    """Returns an id for a request that was refused, for its client and the log."""
    return f"req-{token_hex(16)}"


class RefusalLog:
    """Middleware in front of everything that refuses."""

    def __init__(self, app: ASGIApp, lines: RefusalLines) -> None:
        self._app = app
        self._lines = lines

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
                    headers["X-Request-Id"] = refusal_id()
                    refused = message["status"], headers["X-Request-Id"]
            elif message["type"] == "http.response.body" and refused is not None:
                (status, name), refused = refused, None
                self._lines.say(name, scope["method"], scope["path"], status, message["body"])
            await send(message)

        await self._app(scope, receive, watched)


class AuditLog:
    """Middleware that notes who called an admin endpoint, when, and what came of it; reading is not noted.

    Calls that were refused for lack of a key are in the log of refusals.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on, and logs a line when the answer begins."""
        if scope["type"] != "http" or scope["path"] not in ADMIN_PATHS or scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] not in (401, 403):
                client = scope.get("client")
                who = "unknown" if client is None else client[0]
                key = f" with key {tenant.label}" if (tenant := current_tenant.get()).label else ""
                call = f"{scope['method']} {_one_line(scope['path'])}"
                say(f"admin: {call} by {who}{key}: {message['status']} in {time.monotonic() - began:.3f} s")
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
