"""A small HTTP/1.1 client for load: it keeps connections, and passes bodies on as they arrive.

The cost of the client is measured as if it were the server's. General-purpose clients spend as much on a
request as a server does; this one writes a request in one piece and has nothing between socket and parser.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

import httptools

SILENCE_SECONDS = 600.0
"""A server that is silent for this long is given up."""


class ConnectionBroken(Exception):
    """The server cannot be reached, has closed the connection, or does not speak HTTP."""


class StreamingClient:
    """Requests to one server, any number at a time, each on its own connection."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConnectionBroken(f"{base_url!r} is not the address of a server: it must begin with http://")
        self._is_encrypted = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._is_encrypted else 80)
        self._path = parts.path.rstrip("/")
        fields = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        pieces: list[bytes] = []
        request = f"GET {self._path}{path} HTTP/1.1\r\n{self._head}\r\n"
        status = await self._ask(request.encode(), pieces.append)
        return status, b"".join(pieces)

    async def post(self, path: str, json: bytes, on_body: Callable[[bytes], None]) -> int:
        """Send a JSON body; `on_body` gets the answer's body piece by piece. Returns the status."""
        kind = f"Content-Type: application/json\r\nContent-Length: {len(json)}\r\n"
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}{kind}\r\n"
        return await self._ask(head.encode() + json, on_body)

    def close(self) -> None:
        """Close idle connections."""
        for connection in self._idle:
            connection.close()

    async def _ask(self, request: bytes, on_body: Callable[[bytes], None]) -> int:
        connection = self._kept() or await self._connected()
        try:
            status = await connection.ask(request, on_body)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return status

    def _kept(self) -> _Connection | None:
        """An idle connection that the server has not closed."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        secured = ssl.create_default_context() if self._is_encrypted else None
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=secured)
        except OSError as error:
            raise ConnectionBroken(f"cannot connect to {self._host}:{self._port}: {error}") from error
        return connection


class _Connection(asyncio.Protocol):
    """One request after the other on one socket. The callbacks in the second half are the parser's."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.WriteTransport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._answer: asyncio.Future[int] | None = None
        self._on_body: Callable[[bytes], None] = lambda piece: None
        self._heard_at = 0.0

    async def ask(self, request: bytes, on_body: Callable[[bytes], None]) -> int:
        """Send a request, wait for the end of its answer and return its status."""
        loop = asyncio.get_running_loop()
        if self._transport is None or not self.is_open:
            raise ConnectionBroken("the server has closed the connection")
        self._parser, self._on_body = httptools.HttpResponseParser(self), on_body
        self._answer, self._heard_at = loop.create_future(), perf_counter()
        self._transport.write(request)
        watch = loop.call_later(SILENCE_SECONDS, self._give_up_if_silent)
        try:
            return await self._answer
        finally:
            watch.cancel()

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport, self.is_open = cast("asyncio.WriteTransport", transport), True

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self.is_open = False
        why = f": {exc}" if exc is not None else ""
        self._fail(f"the server closed the connection before the end of the answer{why}")

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self._heard_at = perf_counter()
        try:
            if self._parser is not None:
                self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP: {error}")
            self.close()

    def _fail(self, what: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionBroken(what))

    def _give_up_if_silent(self) -> None:
        left = self._heard_at + SILENCE_SECONDS - perf_counter()
        if self._answer is None or self._answer.done():
            return
        if left > 0:
            asyncio.get_running_loop().call_later(left, self._give_up_if_silent)
        else:
            self._fail(f"the server has sent nothing for {SILENCE_SECONDS:g} s")

    def on_body(self, body: bytes) -> None:
        """Called by httptools."""
        self._on_body(body)

    def on_message_complete(self) -> None:
        """Called by httptools."""
        assert self._parser is not None
        if not self._parser.should_keep_alive():
            self.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(self._parser.get_status_code())
