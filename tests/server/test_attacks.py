"""A stranger attacks: the quick half. Bystanders notice nothing, and nothing stays behind."""

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from .attacks import (
    Footprint,
    Witness,
    connections,
    has_ended,
    pathological,
    raw_request,
    settled,
    wait_for_ends,
)
from .server_process import ServerProcess

MOST = 120
PATIENCE = 1.5
BODY = {"prompt": "a", "max_tokens": 3, "temperature": 0}
LONG = {"prompt": "a", "max_tokens": 200, "temperature": 0}


@pytest.fixture(scope="module")
def attacked(model: Path) -> Iterator[ServerProcess]:
    flags = ("--max-connections", str(MOST), "--client-timeout", str(PATIENCE), "--grace-seconds", "1")
    with ServerProcess(model, *flags) as server:
        server.post("/v1/completions", {**BODY, "stream": True})
        for size in (3_000, 100_000):  # a thread and a process that stay for a while
            server.post("/tokenize", {"prompt": "x" * size})
        yield server


def test_silent_connections(attacked: ServerProcess) -> None:
    """Twice as many as there may be: they make room for whoever has something to say, and are closed."""
    before = Footprint.of(attacked)
    with Witness(attacked) as witness, connections(attacked, 2 * MOST) as silent:
        assert attacked.post("/v1/completions", BODY).status_code == 200
        assert Footprint.of(attacked).descriptors < before.descriptors + MOST + 70
        wait_for_ends(silent, PATIENCE + 2)
    witness.check()
    settled(attacked, before, 5)


def test_slow_headers_and_bodies(attacked: ServerProcess) -> None:
    """A byte now and then does not keep a connection open."""
    head = raw_request({**BODY, "user": "x" * 100})
    with Witness(attacked) as witness, connections(attacked, 80) as slow:
        began = time.monotonic()
        for each in slow[:40]:
            each.sendall(head[:20])
        for each in slow[40:]:
            each.sendall(head[:-90])
        while time.monotonic() < began + PATIENCE + 2.5 and not all(map(has_ended, slow)):
            for each in slow:
                try:
                    each.send(b"x")
                except OSError:
                    continue
            time.sleep(0.1)
        assert all(map(has_ended, slow))
    witness.check()


@pytest.mark.slow
def test_clients_that_never_read(attacked: ServerProcess) -> None:
    """They hold a bounded buffer for a bounded time."""
    attacked.wait_until_idle()
    before = Footprint.of(attacked)
    asked = raw_request({**LONG, "prompt": ["a"] * 4, "logprobs": 20, "stream": True})
    deaf = []
    for _ in range(2):
        each = socket.socket()
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        each.connect(("127.0.0.1", attacked.port))
        each.sendall(asked)
        deaf.append(each)
    with Witness(attacked) as witness:
        time.sleep(2 * PATIENCE)
    witness.check()
    settled(attacked, before, 20)
    attacked.wait_until_idle()
    for each in deaf:
        each.close()


def test_pipelined_requests(attacked: ServerProcess) -> None:
    """Some are answered in their order; a flood of them is refused."""
    ask = raw_request({**BODY, "max_tokens": 2})
    with connections(attacked, 1) as [connection]:
        asked = [raw_request({**BODY, "prompt": letter, "max_tokens": 2}) for letter in "adgj"]
        connection.sendall(b"".join(asked[:-1]) + raw_request({**BODY, "prompt": "j"}, close=True))
        answers = b""
        while part := connection.recv(65536):
            answers += part
        places = [answers.index(text) for text in (b'"bc"', b'"ef"', b'"hi"', b'"klm"')]
        assert places == sorted(places)
    with connections(attacked, 1) as [connection]:
        connection.sendall(ask * 500)
        wait_for_ends([connection], 5)
    attacked.wait_until_idle()


def test_half_closed_connections(attacked: ServerProcess) -> None:
    """A client that will say no more counts as gone: what it asked for is aborted."""
    before = Footprint.of(attacked)
    with connections(attacked, 20) as half:
        for each in half:
            each.sendall(raw_request(LONG))
            each.shutdown(socket.SHUT_WR)
        wait_for_ends(half, 5)
    attacked.wait_until_idle()
    settled(attacked, before, 5)


def test_endless_headers(attacked: ServerProcess) -> None:
    with connections(attacked, 1) as [connection]:
        with pytest.raises(OSError):  # noqa: PT012
            connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
            for _ in range(1000):
                connection.sendall(b"x" * 65536)
    assert attacked.get("/health").status_code == 200


def test_a_full_server_still_answers_probes_and_admins(attacked: ServerProcess) -> None:
    attacked.post("/pause_generation")
    try:
        with connections(attacked, MOST) as busy:
            for each in busy:
                each.sendall(raw_request(LONG))
            end = time.monotonic() + 10
            while attacked.engine_statistics()["waiting"] < MOST:
                assert time.monotonic() < end
                time.sleep(0.05)
            assert attacked.get("/health").status_code == 200
            assert attacked.get("/graphs").status_code == 200
            refused = attacked.post("/v1/completions", BODY)
            assert refused.status_code == 503
            assert int(refused.headers["Retry-After"]) > 0
            assert refused.json()["error"]["message"] == "all connections are in use"
    finally:
        attacked.post("/continue_generation")
    attacked.wait_until_idle()
    assert attacked.post("/v1/completions", BODY).status_code == 200


REFUSED_TEXTS = {
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/responses": lambda text: {"input": text},
    "/v1/embeddings": lambda text: {"input": text},
    "/score": lambda text: {"text_1": "a", "text_2": text},
    "/generate": lambda text: {"text": text},
}


@pytest.mark.slow
def test_eight_megabytes_of_text(attacked: ServerProcess) -> None:
    """What cannot fit is refused by its size; what may be asked for is worked on where it holds up nobody."""
    before = Footprint.of(attacked)
    with Witness(attacked) as witness:
        for path, body in REFUSED_TEXTS.items():
            answer = attacked.post(path, body(pathological("one letter", 8_000_000)))
            assert answer.status_code == 400, path
            assert answer.json()["error"]["code"] == "context_length_exceeded", path
            longest = 256 if path in ("/v1/embeddings", "/score") else 255  # behind which nothing comes
            assert f"at most {longest} tokens are accepted" in answer.json()["error"]["message"]
        answer = attacked.post("/tokenize", {"prompt": pathological("emoji", 400_000)})
        assert answer.json()["count"] > 390_000
    witness.check()
    settled(attacked, before, 10)


LONG_TO_READ = {
    "lists": b'{"prompt": [' + b"[]," * 2_000_000 + b"[]]}",
    "wrong ids": b'{"prompt": [' + b"-1," * 500_000 + b"-1]}",
    "ids": b'{"prompt": [' + b"1," * 3_000_000 + b"1]}",
    "backslashes": b'{"prompt": "' + b"\\\\" * 2_000_000 + b'"}',
    "messages": b'{"messages": [' + b'{"role":"user","content":""},' * 200_000 + b"1]}",
}


def test_bodies_that_are_long_to_read(attacked: ServerProcess) -> None:
    with Witness(attacked) as witness:
        for kind, content in LONG_TO_READ.items():
            path = "/v1/chat/completions" if kind == "messages" else "/v1/completions"
            headers = {"Content-Type": "application/json"}
            answer = httpx.post(attacked.url + path, content=content, headers=headers, timeout=30)
            assert answer.status_code == 400, kind
    witness.check()


SURROGATES = [
    {"prompt": "\ud800"},
    {"prompt": "a", "user": "\udfff"},
    {"prompt": "a", "stop": ["\ud83d\ud83d"]},
    {"prompt": "a", "guided_json": {"type": "string", "enum": ["\ud800"]}},
    {"prompt": "a", "guided_json": {"\udc00": 1}},
    {"prompt": "a", "metadata": {"deep": [{"er": "\udc00\ud800"}]}},
    {"prompt": "a", "guided_choice": ["\ud800"]},
    {"prompt": "a", "guided_json": '{"enum": ["\\ud800"]}'},
]


def test_half_a_surrogate_pair_anywhere(attacked: ServerProcess) -> None:
    headers = {"Content-Type": "application/json"}
    contents = [json.dumps(body).encode() for body in SURROGATES]
    contents += [json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass") for body in SURROGATES]
    for content in contents:
        answer = httpx.post(f"{attacked.url}/v1/completions", content=content, headers=headers)
        assert answer.status_code == 400, answer.text
    named = attacked.post("/v1/completions", content=contents[2], headers=headers).json()["error"]
    assert named["param"] == "stop"
    whole = {**BODY, "user": "\U0001f600 \\ud800"}
    assert attacked.post("/v1/completions", whole).status_code == 200
    escaped = json.dumps(whole).encode()
    answer = httpx.post(f"{attacked.url}/v1/completions", content=escaped, headers=headers)
    assert answer.status_code == 200


def test_a_stop_with_all_kinds_of_clients(attacked: ServerProcess) -> None:
    """The last one with this server: it ends in its grace and two seconds though its engine stands still, and
    nothing is left of either."""
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.connect(("127.0.0.1", attacked.port))
    deaf.sendall(raw_request({**LONG, "prompt": ["a"] * 16, "logprobs": 20, "stream": True}))
    with connections(attacked, 50) as clients, deaf:
        for each in clients[:20]:
            each.sendall(raw_request(LONG)[:-5])
        waiting = http.client.HTTPConnection("127.0.0.1", attacked.port)
        attacked.post("/pause_generation")
        waiting.request("POST", "/v1/completions", json.dumps(LONG), {"Content-Type": "application/json"})
        time.sleep(0.2)
        engine = attacked.engine_pid
        os.kill(engine, signal.SIGSTOP)
        attacked.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        answer = waiting.getresponse()
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) > 0
        assert attacked.process.wait(10) == 0
        assert time.monotonic() - began < 1 + 2
    assert not Path(f"/proc/{engine}").exists()
    assert "Traceback" not in attacked.log
