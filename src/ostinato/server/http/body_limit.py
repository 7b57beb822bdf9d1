"""No body is larger, takes longer to arrive, or is of another kind than the server allows."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..openai.errors import ApiError, unavailable
from .body_check import check_body
from .json_answers import error_response
from .large_bodies import LARGE, Held, LargeBodies


class BodyLimit:
    """Middleware that reads the body whole, within its limits, before anything is done with it."""

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        """`seconds`: a client that sends its body more slowly than this is not waited for."""
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._large = LargeBodies(max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on with the body at hand, or answer 408, 413 or 415."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held = self._large.hold()
        try:
            # Without a task of its own: a body that is there already is read at once, in order of arrival.
            async with asyncio.timeout(self._seconds):
                body = await self._read(scope, receive, held)
            if body:
                _check_kind(scope)
                await self._check(body)
        except TimeoutError:
            error = ApiError(408, f"the body did not arrive within {self._seconds:g} s", code="timeout")
        except ApiError as refused:
            error = refused
        else:
            if body is not None:  # None: the client left in the middle of it
                await self._app(scope, _Replayed(body, receive, held), send)
            return
        finally:
            held.release()
        # The rest of the body is not worth reading, so the connection cannot be used again.
        error.headers["Connection"] = "close"
        await error_response(error)(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive, held: Held) -> bytes | None:
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise self._too_large()
        parts = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            held.take(len(parts[-1]))
            if held.bytes > self._max_bytes:
                raise self._too_large()
            if held.bytes > LARGE and self._large.is_full:
                raise unavailable("too many large bodies are arriving at once", retry_after=1)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _check(self, body: bytes) -> None:
        if len(body) <= LARGE:
            check_body(body)
        else:
            async with self._large.checking:
                await asyncio.to_thread(check_body, body)

    def _too_large(self) -> ApiError:
        limit = self._max_bytes / 2**20
        return ApiError(413, f"the body is larger than {limit:g} MiB", code="body_too_large")


def _check_kind(scope: Scope) -> None:
    """JSON by name: a web page can make a browser send other kinds to anybody, without asking them."""
    headers = dict(scope["headers"])
    coding = headers.get(b"content-encoding", b"identity").strip().lower()
    if coding not in (b"", b"identity"):
        message = f"the body must be sent as it is, without Content-Encoding {coding.decode('latin-1')}"
        raise ApiError(415, message, code="unsupported_media_type")
    declared = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if declared != b"application/json":
        said = declared.decode("latin-1") or "nothing"
        message = f"the body must be JSON, with Content-Type application/json, not {said}"
        raise ApiError(415, message, code="unsupported_media_type")


class _Replayed:
    """`receive` for what comes behind: the body in one piece, then what the client does next."""

    def __init__(self, body: bytes, receive: Receive, held: Held) -> None:
        self._body: bytes | None = body
        self._receive = receive
        self._held = held

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        if len(self._body) > LARGE:
            await self._held.all.turn()
        self._held.release()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}
