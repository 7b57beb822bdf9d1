"""No body is larger, takes longer to arrive, or is of another kind than the server allows."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..openai.errors import ApiError
from .json_answers import error_response

BODY_SECONDS = 30.0
"""A client that sends its body more slowly than this is not waited for."""


class BodyLimit:
    """Middleware that reads the body whole, within its limits, before anything is done with it."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float = BODY_SECONDS) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on with the body at hand, or answer 408, 413 or 415."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            # Without a task of its own: a body that is there already is read at once, in order of arrival.
            async with asyncio.timeout(self._seconds):
                body = await self._read(scope, receive)
            if body:
                _check_kind(scope)
        except TimeoutError:
            error = ApiError(408, f"the body did not arrive within {self._seconds:g} s", code="timeout")
        except ApiError as refused:
            error = refused
        else:
            if body is not None:  # None: the client left in the middle of it
                await self._app(scope, _Replayed(body, receive), send)
            return
        # The rest of the body is not worth reading, so the connection cannot be used again.
        error.headers["Connection"] = "close"
        await error_response(error)(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise self._too_large()
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> ApiError:
        limit = self._max_bytes / 2**20
        return ApiError(413, f"the body is larger than {limit:g} MiB", code="body_too_large")


def _check_kind(scope: Scope) -> None:
    """JSON by name: a web page can make a browser send other kinds to anybody, without asking them."""
    declared = dict(scope["headers"]).get(b"content-type", b"").split(b";")[0].strip().lower()
    if declared != b"application/json":
        said = declared.decode("latin-1") or "nothing"
        message = f"the body must be JSON, with Content-Type application/json, not {said}"
        raise ApiError(415, message, code="unsupported_media_type")


class _Replayed:
    """`receive` for what comes behind: the body in one piece, then what the client does next."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}
