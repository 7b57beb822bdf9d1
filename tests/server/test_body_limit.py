"""Bodies that never end, without a server around."""

import asyncio
from typing import Any

from ostinato.server.http.body_limit import BodyLimit

SCOPE: dict[str, Any] = {"type": "http", "headers": [(b"content-type", b"application/json; charset=utf-8")]}


def answer_of(
    receive: Any, max_bytes: int = 100, seconds: float = 0.1, scope: dict[str, Any] = SCOPE
) -> list[dict]:
    sent: list[dict] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        await send({"type": "served", "body": message["body"], "more": message["more_body"]})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(BodyLimit(app, max_bytes, seconds)(scope, receive, send))
    return sent


def pieces(*bodies: bytes) -> Any:
    left = list(bodies)

    async def receive() -> dict:
        body = left.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(left)}

    return receive


def test_a_body_arrives_in_one_piece() -> None:
    assert answer_of(pieces(b"one ", b"two")) == [{"type": "served", "body": b"one two", "more": False}]


def test_a_compressed_body_is_told_so() -> None:
    for coding, status in ((b"gzip", 415), (b"identity", None)):
        headers = [*SCOPE["headers"], (b"content-encoding", coding)]
        start, *rest = answer_of(pieces(b"{}"), scope={**SCOPE, "headers": headers})
        assert start.get("status") == status
        assert not rest or b"Content-Encoding gzip" in rest[0]["body"]


def test_a_body_that_trickles_is_not_waited_for() -> None:
    async def receive() -> dict:
        await asyncio.sleep(0.03)
        return {"type": "http.request", "body": b"x", "more_body": True}

    start, body = answer_of(receive)
    assert start["status"] == 408
    assert (b"connection", b"close") in start["headers"]
    assert b"timeout" in body["body"]


def test_a_body_too_large_is_refused_at_its_first_byte_too_many() -> None:
    start, _ = answer_of(pieces(b"x" * 60, b"x" * 60, b"never read"))
    assert start["status"] == 413


def test_a_client_that_leaves_in_the_middle_gets_no_answer() -> None:
    async def receive() -> dict:
        return {"type": "http.disconnect"}

    assert answer_of(receive) == []
