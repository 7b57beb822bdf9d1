"""Connections: how many there may be at once, and how long one may keep the server waiting."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..config import ServerConfig
from ..given_back import GivenBack
from ..openai.errors import ApiError, unavailable
from ..tenants.tenant import LOOPBACK, counted_address
from .json_answers import error_response
from .key_gate import KeyGate
from .keys import ADMIN_PATHS
from .large_bodies import HELD_BODIES

RESERVE = 64
"""Connections beyond the limit, for probes and admins alone."""
CLIENT_RESERVE = 8
"""The same beyond the limit of one address."""
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


@dataclass(frozen=True)
class ClientLimits:
    """What clients may take before they have asked for anything; None: as much as all together."""

    connections: int | None = None
    """Of one address."""
    local_connections: int | None = None
    """Of a loopback address."""
    bytes: int | None = None
    """Of requests that are not complete, of one address."""
    local_bytes: int | None = None
    all_bytes: int | None = None

    @staticmethod
    def of(config: ServerConfig, room: int) -> ClientLimits:
        """The limits of a server with room for so many connections."""
        asked = config.max_connections_per_client
        all_mb = config.max_half_sent_mb or HELD_BODIES * config.max_body_mb
        mb = config.max_half_sent_mb_per_client
        return ClientLimits(
            connections=max(1, room // 8) if asked is None else asked,
            local_connections=asked,
            bytes=int((all_mb / 4 if mb is None else mb) * 2**20),
            local_bytes=None if mb is None else int(mb * 2**20),
            all_bytes=int(all_mb * 2**20),
        )


class _Client:
    """The connections of one address."""

    def __init__(self, most: int | None, most_bytes: int | None) -> None:
        self.most = most
        self.most_bytes = most_bytes
        self.half_sent = 0
        self.half: dict[GuardedProtocol, None] = {}
        """Connections with requests that are not complete, by when these began."""
        self.silent: dict[GuardedProtocol, None] = {}
        self.receiving: dict[GuardedProtocol, None] = {}
        self.answering: dict[GuardedProtocol, None] = {}

    def __len__(self) -> int:
        return len(self.silent) + len(self.receiving) + len(self.answering)


class Connections:
    """All connections of a server by what is awaited of each, the oldest first.

    When there are too many, those that have asked for nothing make room, then those that are slow to say what
    they ask for. While all are being answered, new ones are served only if they are probes or admins. The
    same holds among the connections of one address, so that nobody's take the place of others'.
    """

    def __init__(self, most: int, patience: float, max_body_bytes: int, limits: ClientLimits) -> None:
        """`patience`: seconds that a client may take for its headers, and for reading on."""
        self.most = most
        self.half_sent = 0
        """Bytes of requests that are not complete."""
        self._limits = limits
        self._clients: dict[str, _Client] = {}
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
        self.gate: KeyGate | None = None
        """Refuses those without a key."""

    def __len__(self) -> int:
        return len(self.silent) + len(self.receiving) + len(self.answering)

    def protocol(self) -> Callable[..., GuardedProtocol]:
        """What uvicorn makes a connection of."""

        def make(**given: Any) -> GuardedProtocol:
            return GuardedProtocol(self, **given)

        return make

    def admit(self, new: GuardedProtocol) -> str | None:
        """Take a connection in; None, or why it has no place of its own but one of the reserve."""
        client = self._client_of(new.address)
        why = None
        if client.most is not None and len(client) >= client.most and not self._make_room(client):
            why = "this address has too many connections"
        elif len(self) >= self.most and not self._make_room(self):
            why = "all connections are in use"
        self._enter(new, "silent")
        is_beyond = client.most is not None and len(client) > client.most + CLIENT_RESERVE
        if why is not None and (is_beyond or len(self) > self.most + RESERVE):
            new.drop()
        return why

    def leave(self, gone: GuardedProtocol) -> None:
        """A connection is no more."""
        self.hold(gone, 0)
        self._take_out(gone)

    def is_silent(self, connection: GuardedProtocol) -> None:
        """Its next request is awaited, from now on."""
        self._take_out(connection)
        self._enter(connection, "silent")

    def move(self, connection: GuardedProtocol, group: str) -> None:
        """Something else is awaited of a connection now."""
        if connection not in getattr(self, group):
            self._take_out(connection)
            self._enter(connection, group)

    def hold(self, connection: GuardedProtocol, size: int) -> bool:
        """Note how many bytes of an incomplete request there are; False where there is no room for them."""
        more = size - connection.held
        if not more:
            return True
        connection.held = size
        self.half_sent += more
        client = self._client_of(connection.address)
        client.half_sent += more
        if size:
            client.half[connection] = None
        else:
            client.half.pop(connection, None)
        if more < 0:
            return True
        if client.most_bytes is not None:
            while client.half_sent > client.most_bytes:
                if not self._drop_half_sent(client, connection):
                    return False
        if self._limits.all_bytes is not None:
            while self.half_sent > self._limits.all_bytes:
                most = max(self._clients.values(), key=lambda each: each.half_sent)
                if not self._drop_half_sent(most, connection):
                    return False
        return True

    def _drop_half_sent(self, client: _Client, unless: GuardedProtocol) -> bool:
        """Drop what has been arriving for longest of a client's; False where that is `unless`, or its own
        other requests are still too young to be given up for it."""
        oldest = next(iter(client.half))
        is_own = unless.address == oldest.address
        if oldest is unless or (is_own and time.monotonic() - oldest.since < YOUNG_SECONDS):
            return False
        oldest.drop()
        return True

    def _client_of(self, address: str) -> _Client:
        found = self._clients.get(address)
        if found is None:
            limits, is_local = self._limits, address == LOOPBACK
            found = self._clients[address] = _Client(
                limits.local_connections if is_local else limits.connections,
                limits.local_bytes if is_local else limits.bytes,
            )
        return found

    def _enter(self, connection: GuardedProtocol, group: str) -> None:
        for owner in (self, self._client_of(connection.address)):
            getattr(owner, group)[connection] = None

    def _take_out(self, connection: GuardedProtocol) -> None:
        client = self._client_of(connection.address)
        for owner in (self, client):
            for group in (owner.silent, owner.receiving, owner.answering):
                group.pop(connection, None)
        if not client:
            del self._clients[connection.address]

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

    def _make_room(self, owner: Connections | _Client) -> bool:
        oldest = next(iter(owner.silent), None)
        if oldest is None:
            oldest = next(iter(owner.receiving), None)
            if oldest is None or time.monotonic() - oldest.since < YOUNG_SECONDS:
                return False
        oldest.drop()
        return True


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol under the limits of `Connections`."""

    def __init__(self, all: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._all = all
        self.address = ""
        """The client's, as far as its connections are counted together."""
        self.held = 0
        """Bytes of a request that is not complete."""
        self._unread = (0, 0.0)
        """Bytes that the client has not taken, and since when they have not become fewer."""
        self._message_bytes = 0
        self._trailer_bytes = 0
        """Bytes since the last piece of a body; behind its end these are trailers."""
        self._in_headers = True
        self._is_refused = False
        """Its answer is sent; what still comes is thrown away, until the client has read that it may go."""
        self._cycles: list[Any] = []
        """Requests without their answers; uvicorn tells only the last one that the client has left."""
        self.since = time.monotonic()
        """When what is awaited of the client began to be awaited."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = counted_address(self.client[0] if self.client else "")
        why = self._all.admit(self)
        if why is not None:
            self.app = _Reserved(self.app, why)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.held:
            self._all.given_back.soon()
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
        if self._is_refused:
            if self._message_bytes > self._all.max_message_bytes:
                self.drop()
            return
        self._trailer_bytes += len(data)
        if self._in_headers:
            # No other protocol is spoken here, and a request that offers one is answered as it is. The parser
            # would drop its body.
            data = _UPGRADE.sub(b"x-upgrd", data)
        super().data_received(data)
        if self._is_refused:
            # Closing in the middle of a body would reset the connection, and its client might not read why.
            if not self.transport.is_closing() and self.transport.can_write_eof():
                self.transport.write_eof()
            return
        if max(self._message_bytes if self._in_headers else 0, self._trailer_bytes) > MAX_HEADER_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")
        elif self._message_bytes > self._all.max_message_bytes:
            self.drop()
        elif not self._all.hold(self, self._kept_bytes):
            error = unavailable("too much of requests that are not complete is held", retry_after=1)
            self._refuse(b"503 Service Unavailable", error)

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
        if not self._is_refused:
            super().on_body(body)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._trailer_bytes = 0
        hosts = [value for name, value in self.headers if name == b"host"]
        is_1_0 = self.parser.get_http_version() == "1.0"
        if len(hosts) > 1 or not (hosts or is_1_0) or not all(map(HOST.fullmatch, hosts)):
            raise ValueError("one valid Host header is needed")  # ends parsing: the answer is 400
        if self._refuse_at_gate():
            return
        self.since = time.monotonic()
        self._all.move(self, "receiving")
        super().on_headers_complete()
        self._cycles = [each for each in self._cycles if not each.response_complete]
        self._cycles.append(self.cycle)
        if len(self.pipeline) > MAX_PIPELINED:
            raise ValueError("too many requests ahead of their answers")  # ends parsing: the answer is 400

    def _refuse_at_gate(self) -> bool:
        gate = self._all.gate
        if gate is None or not (self.cycle is None or self.cycle.response_complete):
            return False  # an earlier answer is still to come, and answers go out in order
        method = self.parser.get_method().decode("ascii")
        answer = gate.answer(method, self.url, self.headers, self.server_state.default_headers)
        if answer is None:
            return False
        self._is_refused = True
        self._all.hold(self, 0)
        self.transport.write(answer)
        return True

    def send_400_response(self, msg: str) -> None:
        """Ends a connection on which something was sent that is no request."""
        if not self._is_refused:
            super().send_400_response(msg)

    def on_message_complete(self) -> None:
        if self._is_refused:
            self.transport.close()
            raise ValueError("nothing is read behind a refused request")
        self._message_bytes = self._trailer_bytes = 0
        self._in_headers = True
        self._all.move(self, "answering")
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.cycle.response_complete and not self.pipeline:
            self.since = time.monotonic()
            self._all.is_silent(self)

    @property
    def _kept_bytes(self) -> int:
        """Bytes of an incomplete request. What comes behind an answer to it is thrown away."""
        is_answered = not self._in_headers and self.cycle is not None and self.cycle.response_complete
        return 0 if is_answered else self._message_bytes

    def _refuse(self, status: bytes, error: ApiError | None = None) -> None:
        body = b"" if error is None else error.body
        lines = [b"HTTP/1.1 " + status, b"content-length: %d" % len(body), b"connection: close"]
        for name, value in ({} if error is None else error.headers).items():
            lines.append(f"{name}: {value}".encode())
        self._all.hold(self, 0)
        self._all.given_back.soon()
        self.transport.write(b"\r\n".join((*lines, b"", body)))
        self.transport.close()


class _Reserved:
    """The application for connections beyond the limit: it answers probes and admins alone."""

    def __init__(self, app: ASGIApp, why: str) -> None:
        self._app = app
        self._why = why

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].rstrip("/") not in RESERVED_PATHS:
            error = unavailable(self._why, retry_after=1)
            error.headers["Connection"] = "close"
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)
