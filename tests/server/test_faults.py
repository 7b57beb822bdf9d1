"""The engine dies, clients misbehave, signals come: everybody gets an answer and nothing stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from .imported_late import aiohttp
from .scripted_model import counted
from .server_process import ServerProcess

LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 200, "temperature": 0}


async def read_stream(client: aiohttp.ClientSession, url: str, body: dict) -> tuple[str, dict | None]:
    """The text of a completion stream and the error that ended it, if one did."""
    text = ""
    async with client.post(f"{url}/v1/completions", json={**body, "stream": True}) as answer:
        if answer.status != 200:
            return text, (await answer.json())["error"]
        async for line in answer.content:
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                event = json.loads(data)
                if "error" in event:
                    return text, event["error"]
                text += "".join(choice["text"] for choice in event["choices"])
    return text, None


@pytest.mark.slow
def test_engine_killed_under_load(model: Path) -> None:
    async def scenario(server: ServerProcess) -> tuple[list, float]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as client:
            streams = [asyncio.create_task(read_stream(client, server.url, LONG)) for _ in range(40)]
            plain = [
                asyncio.create_task(client.post(f"{server.url}/v1/completions", json=LONG)) for _ in range(10)
            ]
            while (await asyncio.to_thread(server.engine_statistics))["running"] == 0:
                await asyncio.sleep(0.02)
            os.kill(server.engine_pid, signal.SIGKILL)
            killed = time.monotonic()
            ended = await asyncio.gather(*streams)
            for answer in await asyncio.gather(*plain):
                assert answer.status == 503
                ended.append(("", (await answer.json())["error"]))
            return ended, time.monotonic() - killed

    with ServerProcess(model) as server:
        ended, seconds = asyncio.run(scenario(server))
        assert all(error is not None and "engine process ended" in error["message"] for _, error in ended)
        assert any(text for text, _ in ended), "some had begun"
        assert all(counted("a", 200).startswith(text) for text, _ in ended)
        assert seconds < 2
        health = server.get("/health")
        assert health.status_code == 503
        assert "dead" in health.json()["error"]["message"]
        refused = server.post("/v1/completions", LONG)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) > 0
        assert server.process.wait(10) != 0
        assert "signal 9" in server.log


def test_a_stop_lets_requests_finish_in_their_grace_and_tells_the_others(model: Path) -> None:
    """One at a time, the short ones first: the grace is enough for one of these, and never for all."""
    bodies = [{**LONG, "max_tokens": 20}] * 10 + [LONG] * 30

    async def scenario(server: ServerProcess) -> list[tuple[str, dict | None]]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as client:
            await asyncio.to_thread(server.post, "/pause_generation")
            streams: list[asyncio.Task[tuple[str, dict | None]]] = []
            for count in (10, 40):
                new = bodies[len(streams) : count]
                streams += [asyncio.create_task(read_stream(client, server.url, body)) for body in new]
                while (await asyncio.to_thread(server.engine_statistics))["waiting"] < count:
                    await asyncio.sleep(0.02)
            await asyncio.to_thread(server.post, "/continue_generation")
            server.process.send_signal(signal.SIGTERM)
            while "stopping" not in server.log:
                await asyncio.sleep(0.02)
            assert (await asyncio.to_thread(server.get, "/health")).status_code == 503
            assert (await asyncio.to_thread(server.post, "/v1/completions", LONG)).status_code == 503
            return list(await asyncio.gather(*streams))

    one_at_a_time = ("--max-running-requests", "1", "--cuda-graph-bs", "1", "--grace-seconds", "2")
    with ServerProcess(model, *one_at_a_time, module="ostinato.launch_server") as server:
        ended = asyncio.run(scenario(server))
        for body, (text, error) in zip(bodies, ended, strict=True):
            assert error is not None or text == counted("a", body["max_tokens"])
        told = [error["message"] for _, error in ended if error is not None]
        assert told
        assert set(told) == {"the server is shutting down"}
        under_way = re.search(r"stopping; (\d+) requests under way", server.log)
        assert under_way is not None
        assert len(told) < int(under_way[1]), "some have ended in the grace"
        assert server.process.wait(10) == 0


def test_a_model_that_cannot_load_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    server = ServerProcess(tmp_path, wait=False)
    with server:
        assert server.process.wait(40) == 1
        assert "Traceback" not in server.log
        assert "engine process ended" in server.log
        assert "exit code" not in server.log, "what the engine said last is the reason"


def test_disconnecting_aborts(server: ServerProcess) -> None:
    server.wait_until_idle()
    for stream in (True, False):
        server.post("/pause_generation")
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            raw = json.dumps({**LONG, "stream": stream}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n"
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + raw)
            while server.engine_statistics()["waiting"] == 0:
                time.sleep(0.05)
        end = time.monotonic() + 5
        while server.engine_statistics()["waiting"]:
            assert time.monotonic() < end
            time.sleep(0.05)
        server.post("/continue_generation")
    server.wait_until_idle()


def test_a_slow_reader_holds_up_nobody(server: ServerProcess) -> None:
    """It reads nothing while others are served, then finds everything, in order."""
    body = {**LONG, "prompt": ["a"] * 16, "max_tokens": 200, "logprobs": 5, "stream": True}
    raw = json.dumps(body).encode()
    before = server.get("/stats").json()["generation_tokens"]
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n"
        slow.sendall(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + raw)
        end = time.monotonic() + 30
        while server.get("/stats").json()["generation_tokens"] < before + 16 * 200:
            assert time.monotonic() < end, "the engine must finish though nobody reads"
            time.sleep(0.05)
        started = time.monotonic()
        assert server.post("/v1/completions", {**LONG, "max_tokens": 5}).status_code == 200
        assert time.monotonic() - started < 2
        slow.settimeout(10)
        received = b""
        while part := slow.recv(65536):
            received += part
    texts = [""] * 16
    for line in received.split(b"data: ")[1:]:
        with contextlib.suppress(ValueError):  # [DONE], and chunk sizes of the transfer encoding
            for choice in json.loads(line.split(b"\n\n")[0])["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == [counted("a", 200)] * 16
    assert b"[DONE]" in received
    server.wait_until_idle()


def exchange(server: ServerProcess, sent: bytes) -> bytes:
    """What the server answers to raw bytes before it closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(sent)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
    return answer


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
)


def test_malformed_chunked_body(server: ServerProcess) -> None:
    for broken in (b"zz\r\n{}\r\n", b"-5\r\nhello", b"5\r\nhelloworld\r\n0\r\n\r\n"):
        answer = exchange(server, CHUNKED + broken)
        assert answer.startswith(b"HTTP/1.1 400"), answer
    assert server.get("/health").status_code == 200


def test_a_well_formed_chunked_body_works(server: ServerProcess) -> None:
    raw = json.dumps({**LONG, "max_tokens": 2}).encode()
    halves = raw[:10], raw[10:]
    body = b"".join(b"%x\r\n%s\r\n" % (len(half), half) for half in halves) + b"0\r\n\r\n"
    assert b'"text":"bc"' in exchange(server, CHUNKED + body)


def test_a_body_that_stops_in_the_middle(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(CHUNKED + b'5\r\n{"pro\r\n')
    assert server.get("/health").status_code == 200


def test_oversized_body(server: ServerProcess) -> None:
    declared = server.post("/v1/completions", {"prompt": "x" * 9_000_000})
    assert declared.status_code == 413
    assert declared.json()["error"]["code"] == "body_too_large"
    chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(CHUNKED)
        answer = b""
        with contextlib.suppress(ConnectionError):
            for _ in range(12):
                connection.sendall(chunk)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(4096):
                answer += part
    assert not answer or answer.startswith(b"HTTP/1.1 413")
    assert server.get("/health").status_code == 200


def test_not_json(server: ServerProcess) -> None:
    for content in (b"", b"{", b"[1]", b"\xff", b'{"prompt": NaN}', b"[" * 100_000):
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
        assert answer.status_code == 400, content[:10]
        assert answer.json()["error"]["type"] == "invalid_request_error"
    halves = (b'{"prompt": "a", "\\ud800": 1}', b'{"prompt": "a", "model": "\\ud800"}')
    numbers = (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": "a", "temperature": 1e999}')
    shapes = (b'{"prompt": "a", "response_format": {"type": "regex", "regex": "\\udfff"}}',)
    for content in (*halves, *numbers, *shapes):
        answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["message"]
    plain = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "a"}')
    assert plain.status_code == 415


@pytest.mark.parametrize("path", ["/nothing", "/v1/nothing", "/nothing/"])
def test_unknown_paths(server: ServerProcess, path: str) -> None:
    answer = server.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


def test_wrong_method(server: ServerProcess) -> None:
    answer = server.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert answer.headers["Allow"] == "POST"
