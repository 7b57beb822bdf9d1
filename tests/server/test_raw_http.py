"""What stands on the line: hosts, trailers, offers of other protocols."""

import json
import socket
import time

import pytest

from .attacks import Footprint
from .server_process import ServerProcess

BODY = json.dumps({"prompt": "a", "max_tokens": 3, "temperature": 0}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
CLOSE = b"\r\nConnection: close\r\n\r\n"
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


@pytest.mark.parametrize("parts", [1, 2, 3], ids=["at once", "body later", "half a body"])
def test_a_wrong_key_is_told_whatever_of_the_body_is_there(keyed: ServerProcess, parts: int) -> None:
    """The answer is whole, with an id that the log has too, and the connection ends."""
    head = SIZED.replace(b"Connection: close\r\n", b"Host: x\r\nAuthorization: Bearer wrong\r\n") + b"\r\n"
    sent = {1: [head + BODY], 2: [head, BODY], 3: [head + BODY[:5]]}[parts]
    lines, _, body = said(keyed, *sent).partition(b"\r\n\r\n")
    first, *rest = lines.split(b"\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in rest)
    assert first == b"HTTP/1.1 401 Unauthorized"
    assert json.loads(body)["error"]["code"] == "invalid_api_key"
    assert int(headers[b"content-length"]) == len(body)
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"www-authenticate"] == b"bearer"
    assert headers[b"connection"] == b"close"
    assert headers[b"date"]
    name = headers[b"x-request-id"].decode()
    assert f"{name} refused: POST /v1/completions 401: the API key is wrong" in keyed.log


def test_requests_without_a_key_are_counted_and_answered_in_order(keyed: ServerProcess) -> None:
    def num_refused() -> float:
        text = keyed.get("/metrics").text
        found = [
            float(line.split()[-1])
            for line in text.splitlines()
            if "http_answers_total{" in line and 'path="/v1/models"' in line and 'status="401"' in line
        ]
        return sum(found)

    before = num_refused()
    get = b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n"
    ahead = said(
        keyed, get % b"/version" + get % b"/v1/models?a=1" + get.replace(b"\r\n\r\n", CLOSE) % b"/health"
    )
    assert ahead.index(b'"version"') < ahead.index(b" 401 ")
    one = said(keyed, get % b"/v1%2Fmodels/" + get % b"/v1/models")
    assert one.count(b"HTTP/1.1 401") == 1, "nothing is read behind a refusal"
    no_body = said(keyed, get.replace(b"GET", b"HEAD") % b"/v1/models")
    assert no_body.endswith(b"\r\n\r\n")
    with_key = get.replace(b"\r\n\r\n", b"\r\nAuthorization: bearer two" + CLOSE) % b"/v1/models/"
    assert status(said(keyed, with_key)) == 200
    end = time.monotonic() + 5
    while (found := num_refused() - before) != 3:
        assert time.monotonic() < end, found
        time.sleep(0.1)


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
