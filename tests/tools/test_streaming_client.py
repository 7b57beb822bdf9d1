"""The load generator's client, against a server that answers what the test says."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

pytest.importorskip("httptools")

from ostinato.tools import streaming_client
from ostinato.tools.openai_stream import StreamedRequest, stream
from ostinato.tools.streaming_client import ConnectionBroken, StreamingClient

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(text: str, usage: str = "null") -> bytes:
    return b'data: {"choices": [{"text": "%s"}], "usage": %s}\n\n' % (text.encode(), usage.encode())


class Server:
    """Sends the given pieces to every request, one write each; counts connections and keeps requests."""

    def __init__(self, *pieces: bytes, closes: bool = False) -> None:
        self.pieces, self.closes = pieces, closes
        self.connections = 0
        self.requests: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            length = next(
                (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")), 0
            )
            self.requests.append(head + await reader.readexactly(length))
            for piece in self.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.002)
            if self.closes:
                break
        writer.close()


def against(server: Server, talk: Callable[[StreamingClient], Awaitable[object]]) -> object:
    async def main() -> object:
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
            client = StreamingClient(
                f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/base", {"X-A": "b"}
            )
            try:
                return await talk(client)
            finally:
                client.close()

    return asyncio.run(main())


def completion(server: Server) -> StreamedRequest:
    found = against(server, lambda client: stream(client, "/v1/completions", b'{"n": 1}', 0.0))
    assert isinstance(found, StreamedRequest)
    return found


def test_events_may_be_cut_anywhere() -> None:
    whole = event("a") + event("b", '{"prompt_tokens": 3, "completion_tokens": 2}') + b"data: [DONE]\n\n"
    for cut in (1, 7, len(event("a")) - 1, len(event("a")), len(whole) - 3):
        server = Server(CHUNKED, chunk(whole[:cut]), chunk(whole[cut:]), b"0\r\n\r\n")
        found = completion(server)
        assert found.error is None
        assert (found.prompt_tokens, found.output_tokens, len(found.arrivals)) == (3, 2, 2)
    [request] = server.requests
    assert request.startswith(b"POST /base/v1/completions HTTP/1.1\r\n")
    assert b"\r\nX-A: b\r\n" in request
    assert request.endswith(b'\r\n\r\n{"n": 1}')


def test_a_connection_is_used_again() -> None:
    server = Server(CHUNKED, chunk(event("a")), b"0\r\n\r\n")

    async def three(client: StreamingClient) -> list[StreamedRequest]:
        return [await stream(client, "/v1/completions", b"{}", 0.0) for _ in range(3)]

    found = against(server, three)
    assert isinstance(found, list)
    assert [each.output_tokens for each in found] == [1, 1, 1]
    assert server.connections == 1


def test_a_connection_that_the_server_has_closed_meanwhile_is_not_used() -> None:
    server = Server(CHUNKED, chunk(event("a")), b"0\r\n\r\n", closes=True)

    async def with_a_pause(client: StreamingClient) -> list[StreamedRequest]:
        first = await stream(client, "/v1/completions", b"{}", 0.0)
        await asyncio.sleep(0.1)
        return [first, await stream(client, "/v1/completions", b"{}", 0.0)]

    found = against(server, with_a_pause)
    assert isinstance(found, list)
    assert [each.error for each in found] == [None, None]
    assert server.connections == 2


def test_a_refusal_is_told_with_its_status() -> None:
    found = completion(Server(b"HTTP/1.1 429 Busy\r\nContent-Length: 9\r\n\r\nqueue too"))
    assert found.error == "HTTP 429: queue too"


@pytest.mark.parametrize(
    ("pieces", "told"),
    [
        ((CHUNKED, chunk(event("a"))), "closed the connection before the end"),
        ((b"what?\r\n\r\n",), "not HTTP"),
        ((CHUNKED, chunk(b"data: what?\n\n"), b"0\r\n\r\n"), "not a chunk of a completion"),
        ((CHUNKED, chunk(b'data: {"error": {"message": "gone"}}\n\n'), b"0\r\n\r\n"), "gone"),
        ((CHUNKED, chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"), "the answer had no text"),
    ],
)
def test_what_goes_wrong_is_told(pieces: tuple[bytes, ...], told: str) -> None:
    assert told in str(completion(Server(*pieces, closes=True)).error)


def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming_client, "SILENCE_SECONDS", 0.05)
    assert "sent nothing for 0.05 s" in str(completion(Server()).error)


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ConnectionBroken, match=r"cannot connect to 127\.0\.0\.1:1:"):
        asyncio.run(StreamingClient("http://127.0.0.1:1").get("/"))
    with pytest.raises(ConnectionBroken, match="must begin with http"):
        StreamingClient("localhost:8000")
