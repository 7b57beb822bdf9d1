"""Connections: how many there may be at once, and how long one may keep the server waiting."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import time
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..given_back import GivenBack
from ..openai.errors import unavailable
from .json_answers import error_response
from .keys import ADMIN_PATHS

RESERVE = 64
"""Connections beyond the limit, for probes and admins alone."""
RESERVED_PATHS = frozenset({"/health", "/ping", "/metrics", "/stats", "/version"}) | ADMIN_PATHS
OTHER_DESCRIPTORS = 256
"""Files, pipes and sockets of the process that are no clients."""
MAX_PIPELINED = 32
"""Requests that a client may send ahead of their answers."""
MAX_HEADER_BYTES = 65536
"""Of the headers, and of the trailers behind a chunked body."""
HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%-]+)?(?::[0-9]*)?")
"""A Host header without a user before it, which would be read as part of the address by some."""
_UPGRADE = re.compile(rb"(?i)(?<=\n)upgrade(?=[ \t]*:)")
SWEEP_SECONDS = 0.5
YOUNG_SECONDS = 1.0
"""A body that has been arriving for less is not given up for the sake of another client."""


def room_for_connections(wanted: int) -> int:
    """Raise the limit on descriptors so that `wanted` connections fit; how many do."""
    needed = wanted + RESERVE + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):  # some systems have a lower limit than they tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    return max(1, soft - RESERVE - OTHER_DESCRIPTORS)


class Connections:
    """All connections of a server by what is awaited of each, the oldest first.

    When there are too many, those that have asked for nothing make room, then those that are slow to say what
    they ask for. While all are being answered, new ones are served only if they are probes or admins.
    """

    def __init__(self, most: int, patience: float, max_body_bytes: int) -> None:
        """`patience`: seconds that a client may take for its headers, and for reading on."""
        self.most = most
        self.patience = patience
        # A body in chunks of a byte each is six times as long on the line.
        self.max_message_bytes = 8 * max_body_bytes + MAX_HEADER_BYTES
        self.silent: dict[GuardedProtocol, None] = {}
        """Their next request has not come yet, or not all of its headers."""
        self.receiving: dict[GuardedProtocol, None] = {}
        """Their body is on its way."""
        self.answering: dict[GuardedProtocol, None] = {}
        self.dropped = 0
        """Connections that were closed on their clients."""
        self.given_back = GivenBack()

    def __len__(self) -> int:
        return len(self.silent) + len(self.receiving) + len(self.answering)

    def protocol(self) -> Callable[..., GuardedProtocol]:
        """What uvicorn makes a connection of."""

        def make(**given: Any) -> GuardedProtocol:
            return GuardedProtocol(self, **given)

        return make

    def admit(self, new: GuardedProtocol) -> bool:
        """Take a connection in; whether it has a place of its own, not one of the reserve."""
        has_place = len(self) < self.most or self._make_room()
        self.silent[new] = None
        if not has_place and len(self) > self.most + RESERVE:
            new.drop()
        return has_place

    def leave(self, gone: GuardedProtocol) -> None:
        """A connection is no more."""
        for group in (self.silent, self.receiving, self.answering):
            group.pop(gone, None)

    def move(self, connection: GuardedProtocol, group: dict[GuardedProtocol, None]) -> None:
        """Something else is awaited of a connection now."""
        if connection not in group:
            self.leave(connection)
            group[connection] = None

    async def watch(self) -> None:
        """Drop those that keep the server waiting, for ever."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep(time.monotonic())

    def sweep(self, now: float) -> None:
        """Drop those that have kept the server waiting for too long."""
        late = []
        for connection in self.silent:
            if now - connection.since < self.patience:
                break  # the others are younger
            late.append(connection)
        stuck = [
            connection
            for group in (self.silent, self.receiving, self.answering)
            for connection in group
            if connection.unread_for(now) >= self.patience
        ]
        for connection in (*late, *stuck):
            connection.drop()

    def drop_unheard(self) -> None:
        """The server leaves: those that have not said what they want will not be answered."""
        for connection in (*self.silent, *self.receiving):
            connection.drop()

    def drop_all(self) -> None:
        """The server has left."""
        for connection in (*self.silent, *self.receiving, *self.answering):
            connection.drop()

    def _make_room(self) -> bool:
        oldest = next(iter(self.silent), None)
        if oldest is None:
            oldest = next(iter(self.receiving), None)
            if oldest is None or time.monotonic() - oldest.since < YOUNG_SECONDS:
                return False
        oldest.drop()
        return True


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol under the limits of `Connections`."""

    def __init__(self, all: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all = all
        self._unread = (0, 0.0)
        """Bytes that the client has not taken, and since when they have not become fewer."""
        self._message_bytes = 0
        self._trailer_bytes = 0
        """Bytes since the last piece of a body; behind its end these are trailers."""
        self._in_headers = True
        self._cycles: list[Any] = []
        """Requests without their answers; uvicorn tells only the last one that the client has left."""
        self.since = time.monotonic()
        """When what is awaited of the client began to be awaited."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._all.admit(self):
            self.app = _Reserved(self.app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.leave(self)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection now; whatever it asked for is aborted."""
        self._all.leave(self)
        self._all.dropped += 1
        self._all.given_back.soon()
        self.transport.abort()

    def unread_for(self, now: float) -> float:
        """Seconds in which the client has taken nothing of what lies there for it."""
        size = self.transport.get_write_buffer_size()
        before, since = self._unread
        if not size or size < before or not before:
            self._unread = size, now
            return 0.0
        self._unread = size, since
        return now - since

    # -- as the parser goes through what comes -----------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._message_bytes += len(data)
        self._trailer_bytes += len(data)
        if self._in_headers:
            # No other protocol is spoken here, and a request that offers one is answered as it is. The parser
            # would drop its body.
            data = _UPGRADE.sub(b"x-upgrd", data)
        super().data_received(data)
        if max(self._message_bytes if self._in_headers else 0, self._trailer_bytes) > MAX_HEADER_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")
        elif self._message_bytes > self._all.max_message_bytes:
            self.drop()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes a header. Trailers are not read: they come when the headers have been acted on."""
        if self._in_headers:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Takes a piece of the body."""
        self._trailer_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._trailer_bytes = 0
        hosts = [value for name, value in self.headers if name == b"host"]
        is_1_0 = self.parser.get_http_version() == "1.0"
        if len(hosts) > 1 or not (hosts or is_1_0) or not all(map(HOST.fullmatch, hosts)):
            raise ValueError("one valid Host header is needed")  # ends parsing: the answer is 400
        self.since = time.monotonic()
        self._all.move(self, self._all.receiving)
        super().on_headers_complete()
        self._cycles = [each for each in self._cycles if not each.response_complete]
        self._cycles.append(self.cycle)
        if len(self.pipeline) > MAX_PIPELINED:
            raise ValueError("too many requests ahead of their answers")  # ends parsing: the answer is 400

    def on_message_complete(self) -> None:
        self._message_bytes = self._trailer_bytes = 0
        self._in_headers = True
        self._all.move(self, self._all.answering)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.cycle.response_complete and not self.pipeline:
            self.since = time.monotonic()
            self._all.leave(self)
            self._all.silent[self] = None

    def _refuse(self, status: bytes) -> None:
        self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()


class _Reserved:
    """The application for connections beyond the limit: it answers probes and admins alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].rstrip("/") not in RESERVED_PATHS:
            error = unavailable("all connections are in use", retry_after=1)
            error.headers["Connection"] = "close"
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)
