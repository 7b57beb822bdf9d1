"""What stands on the line: hosts, trailers, offers of other protocols."""

import json
import socket
import time

import pytest

from .attacks import Footprint
from .server_process import ServerProcess

BODY = json.dumps({"prompt": "a", "max_tokens": 3, "temperature": 0}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
SIZED = HEAD + b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = HEAD + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n"


def said(server: ServerProcess, *parts: bytes) -> bytes:
    """The answer to bytes that are sent one part behind the other, up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        answer = b""
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(0.05 if len(parts) > 1 else 0)
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionError:
            pass
        return answer


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize("offer", [b"h2c", b"websocket", b"HTTP/2.0"])
def test_an_offer_of_another_protocol_is_ignored(server: ServerProcess, offer: bytes) -> None:
    head = SIZED.replace(b"Connection: close", b"Connection: Upgrade, HTTP2-Settings, close")
    offered = head + b"Host: x\r\nUpgrade: " + offer + b"\r\nHTTP2-Settings: AAA\r\n\r\n"
    answer = said(server, offered + BODY)
    assert status(answer) == 200
    assert b'"bcd"' in answer
    assert status(said(server, offered, BODY)) == 200


@pytest.mark.parametrize(
    "hosts", [(), (b"x", b"x"), (b"[",), (b"user@127.0.0.1",), (b"127.0.0.1 evil",), (b"localhost:x",)]
)
def test_a_request_has_one_host(server: ServerProcess, hosts: tuple[bytes, ...]) -> None:
    lines = b"".join(b"Host: %s\r\n" % host for host in hosts)
    assert status(said(server, b"GET /graphs HTTP/1.1\r\nConnection: close\r\n" + lines + b"\r\n")) == 400


@pytest.mark.parametrize("host", [b"127.0.0.1", b"localhost:80", b"[::1]:80", b"127.0.0.1:"])
def test_hosts_of_this_machine_are_loopback(server: ServerProcess, host: bytes) -> None:
    head = b"GET /graphs HTTP/1.1\r\nConnection: close\r\nHost: " + host
    assert status(said(server, head + b"\r\n\r\n")) == 200
    for site in (b"cross-site", b"same-site"):
        assert status(said(server, head + b"\r\nSec-Fetch-Site: " + site + b"\r\n\r\n")) == 403
    assert status(said(server, head + b"\r\nSec-Fetch-Site: same-origin\r\n\r\n")) == 200


def test_trailers_are_no_headers(keyed: ServerProcess) -> None:
    key = b"Authorization: Bearer one\r\n"
    assert status(said(keyed, CHUNKED + key + b"\r\n")) == 401
    admin = CHUNKED.replace(b"/v1/completions", b"/abort") + b"Authorization: Bearer three\r\n\r\n"
    assert status(said(keyed, admin)) == 401
    with_key = CHUNKED.replace(b"Host: x\r\n", b"Host: x\r\n" + key)
    assert status(said(keyed, with_key + b"X-Sum: 1\r\n\r\n")) == 200
    before = Footprint.of(keyed)
    for trailers in (b"X: " + b"y" * 2**24, b"X: y\r\n" * 2**21):
        assert status(said(keyed, with_key + trailers) or b"x 431 x") in (400, 431)
    assert Footprint.of(keyed).private_bytes < before.private_bytes + 2**24
