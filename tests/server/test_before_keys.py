"""What clients without a key can do to those with one: connections and half-sent requests of one address are
counted together, probes have a port of their own, and memory goes back."""

import contextlib
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ostinato.server.http.connections import ClientLimits, Connections
from ostinato.server.tenants.tenant import AddressTenants, counted_address

from .attacks import (
    MOST_SLOWDOWN,
    Footprint,
    Witness,
    connections,
    has_ended,
    raw_request,
    settled,
    wait_for_ends,
)
from .server_process import ServerProcess

KEY = {"Authorization": "Bearer secret"}
BODY = {"prompt": "a", "max_tokens": 3, "temperature": 0}
FLAGS = ("--api-key", "secret", "--client-timeout", "4", "--probe-port", "0")
PER_CLIENT = 40


@pytest.fixture(scope="module")
def counted(model: Path) -> Iterator[ServerProcess]:
    """Limits that hold for loopback too, because they are given."""
    limits = ("--max-connections", "200", "--max-connections-per-client", str(PER_CLIENT))
    bytes_ = ("--max-half-sent-mb", "4", "--max-half-sent-mb-per-client", "2")
    with ServerProcess(model, *FLAGS, *limits, *bytes_) as server:
        server.post("/v1/completions", BODY, headers=KEY)
        yield server


def probe_url(server: ServerProcess) -> str:
    found = re.search(r"probes on (http://\S+)", server.log)
    assert found
    return found[1]


def test_connections_of_one_address(counted: ServerProcess) -> None:
    """Its silent ones make room for its new ones; while all are busy, new ones are for probes."""
    before = Footprint.of(counted)
    with connections(counted, 3 * PER_CLIENT) as silent:
        assert counted.post("/v1/completions", BODY, headers=KEY).status_code == 200
        assert Footprint.of(counted).descriptors <= before.descriptors + PER_CLIENT + 10
        assert sum(map(has_ended, silent)) >= 2 * PER_CLIENT - 8
    head = raw_request({**BODY, "user": "x" * 100})[:-20]
    with connections(counted, PER_CLIENT) as slow:
        for each in slow:  # young, so they are not given up for others
            each.sendall(head)
        refused = counted.post("/v1/completions", BODY, headers=KEY)
        if refused.status_code != 200:  # a slow machine may have let them grow old
            assert refused.status_code == 503
            assert refused.json()["error"]["message"] == "this address has too many connections"
            assert int(refused.headers["Retry-After"]) > 0
        assert counted.get("/health").status_code == 200


def test_half_sent_bytes_of_one_address(counted: ServerProcess) -> None:
    """The oldest make room; what is complete in time is served."""
    with connections(counted, 30) as slow:
        for each in slow:
            with contextlib.suppress(OSError):
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                head += b"Authorization: Bearer secret\r\nContent-Length: 900000\r\n\r\n"
                each.sendall(head + b"x" * 400_000)
        end = time.monotonic() + 3
        while (num_ended := sum(map(has_ended, slow))) < 20:
            assert time.monotonic() < end, num_ended
            time.sleep(0.05)
        time.sleep(1.1)
        large = {**BODY, "user": "u", "metadata": {"a": "x" * 900_000}}
        assert counted.post("/v1/completions", large, headers=KEY).status_code == 200


def test_probes_have_a_port_of_their_own(counted: ServerProcess) -> None:
    url = probe_url(counted)
    for path in ("/health", "/ping", "/metrics", "/version"):
        assert httpx.get(url + path).status_code == 200, path
    for path in ("/v1/models", "/", "/stats", "/graphs"):
        assert httpx.get(url + path, headers=KEY).status_code == 404, path
    with contextlib.ExitStack() as stack:
        host, port = url.removeprefix("http://").split(":")
        for _ in range(300):  # more than it has places
            stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
        began = time.monotonic()
        assert httpx.get(url + "/health").status_code == 200
        assert time.monotonic() - began < 2


def test_addresses_are_counted_by_who_owns_them() -> None:
    same = ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", "2001:db8:1:2::%eth0")
    assert len({counted_address(each) for each in same}) == 1
    assert counted_address("2001:db8:1:3::1") != counted_address(same[0])
    assert counted_address("::ffff:10.0.0.1") == counted_address("10.0.0.1") != counted_address("10.0.0.2")
    assert len({counted_address(each) for each in ("127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1")}) == 1
    tenants = AddressTenants()
    assert len({tenants.of(each).name for each in same}) == 1
    assert tenants.of("::ffff:10.0.0.1") is tenants.of("10.0.0.1") is not tenants.of("10.0.0.2")


class _Connection:
    """What is counted."""

    def __init__(self, all: Connections, address: str, age: float) -> None:
        self.all, self.address, self.held, self.since = all, address, 0, time.monotonic() - age
        self.is_open = True

    def drop(self) -> None:
        self.is_open = False
        self.all.leave(self)  # type: ignore[arg-type]


def test_who_holds_most_loses_first() -> None:
    """In total: a client below its own limit is served while others take all there is."""
    limits = ClientLimits(connections=None, bytes=400, local_bytes=None, all_bytes=1000)
    all = Connections(1000, 30.0, 2**20, limits)
    hostile = [_Connection(all, f"10.0.0.{number % 4}", age=0.1) for number in range(40)]
    for each in hostile:
        all.admit(each)  # type: ignore[arg-type]
        all.hold(each, 25)  # type: ignore[arg-type]
    assert all.half_sent == 1000
    honest = _Connection(all, "10.9.9.9", age=0.0)
    all.admit(honest)  # type: ignore[arg-type]
    for size in range(10, 160, 10):
        assert all.hold(honest, size)  # type: ignore[arg-type]
        assert all.half_sent <= 1000
    assert honest.is_open
    alone = _Connection(all, "10.0.0.1", age=0.0)
    all.admit(alone)  # type: ignore[arg-type]
    assert not all.hold(alone, 500)  # type: ignore[arg-type]
    for each in (*hostile, honest, alone):
        each.drop()
    assert (all.half_sent, len(all), len(all._clients)) == (0, 0, 0)


def test_metrics_cost_nothing_however_often(counted: ServerProcess) -> None:
    """Written once in a while: the text itself stands still in between."""
    with httpx.Client(base_url=counted.url) as client:
        texts = Counter(client.get("/metrics").text for _ in range(60))
    assert len(texts) < 30


# -- attacks on all endpoints, before any key ------------------------------------------------------


def attack_bytes(paths: list[str]) -> list[tuple[str, list[bytes], float]]:
    """Name, what is sent piece by piece, and the pause between the pieces."""
    kinds: list[tuple[str, list[bytes], float]] = []
    for path in paths:
        post = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
        wrong = b"Authorization: Bearer wrong\r\n"
        chunked = post + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        content = b"Content-Length: 8000000\r\n\r\n"
        kinds += [
            ("slow headers", [post, *([b"X: y\r\n"] * 40)], 0.1),
            ("slow body", [post + content, *([b'{"a":'] * 40)], 0.1),
            ("trailers", [chunked + b"X: " + b"y" * 60_000, *([b"z" * 60_000] * 4)], 0.0),
            ("half a body", [post + content + b"x" * 200_000], 0.0),
            ("wrong key", [post + wrong + b"Content-Length: 2\r\n\r\n{}"], 0.0),
            ("pipelined", [(post + wrong + b"Content-Length: 2\r\n\r\n{}") * 200], 0.0),
            ("churn", [], 0.0),
        ]
    return kinds


class Attack:
    """So many connections at once, from one thread: whichever ends begins again with the next kind."""

    def __init__(self, port: int, kinds: list[tuple[str, list[bytes], float]], count: int) -> None:
        self._port, self._kinds, self._count = port, kinds, count
        self.num_opened = self.most_at_once = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Attack":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join(30)

    def _run(self) -> None:
        import selectors

        at_work: dict[socket.socket, list[Any]] = {}
        selector = selectors.DefaultSelector()

        def end(each: socket.socket) -> None:
            selector.unregister(each)
            at_work.pop(each, None)
            each.close()

        while not self._done.is_set():
            for _ in range(min(50, self._count - len(at_work))):
                each = socket.socket()
                each.setblocking(False)
                each.connect_ex(("127.0.0.1", self._port))
                _, pieces, pause = self._kinds[self.num_opened % len(self._kinds)]
                at_work[each] = [list(pieces), pause, 0.0, time.monotonic() + 6]
                selector.register(each, selectors.EVENT_READ | selectors.EVENT_WRITE)
                self.num_opened += 1
            self.most_at_once = max(self.most_at_once, len(at_work))
            now = time.monotonic()
            for key, events in selector.select(0.02):
                each = key.fileobj
                assert isinstance(each, socket.socket)
                work = at_work[each]
                try:
                    if events & selectors.EVENT_READ and not each.recv(65536):
                        end(each)
                        continue
                    if events & selectors.EVENT_WRITE and work[0] and now >= work[2]:
                        sent = each.send(work[0][0])
                        work[0][0] = work[0][0][sent:]
                        if not work[0][0]:
                            work[0].pop(0)
                            work[2] = now + work[1]
                    elif not work[0] and not self._kinds_wait(now, work):
                        end(each)
                except BlockingIOError:
                    continue
                except OSError:
                    end(each)
            time.sleep(0.01)
        for each in list(at_work):
            end(each)

    @staticmethod
    def _kinds_wait(now: float, work: list[Any]) -> bool:
        """Half of a request stands for seconds; who only connects goes at once."""
        return bool(work[1] or now < work[3] - 3)


def served_during(server: ServerProcess, attack: Attack, seconds: float) -> tuple[list[float], int]:
    """Times of a client with a key, and the most memory of the process that has connections."""
    times, most = [], 0
    with attack:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            answer = server.post("/v1/completions", BODY, headers=KEY)
            times.append(time.monotonic() - began)
            assert answer.status_code == 200, answer.text
            most = max(most, Footprint.of(server).private_bytes)
            time.sleep(0.1)
    return times, most


def all_paths(server: ServerProcess) -> list[str]:
    found = json.loads(server.get("/openapi.json", headers=KEY).text)["paths"]
    return sorted(path for path in found if "{" not in path)


def check_attack(server: ServerProcess, count: int, seconds: float, quick: float, bound: int) -> None:
    before = Footprint.of(server)
    attack = Attack(server.port, attack_bytes(all_paths(server)), count)
    with Witness(server, stream=False) as witness:
        times, most = served_during(server, attack, seconds)
    slowdown = 1 / max(1 - witness.seen["others"], 1 / MOST_SLOWDOWN)
    times.sort()
    print(
        f"{attack.num_opened} connections, {attack.most_at_once} at once; {len(times)} requests, "
        f"median {times[len(times) // 2]:.3f} s, slowest {times[-1]:.3f} s; "
        f"others took {witness.seen['others']:.0%}; "
        f"memory {before.private_bytes / 2**20:.0f}, at most {most / 2**20:.0f} MiB"
    )
    assert attack.most_at_once >= count * 0.9
    assert times[-1] < quick * slowdown
    assert most < before.private_bytes + bound
    settled(server, before, 15)


def test_attacks_before_keys(model: Path) -> None:
    with ServerProcess(model, *FLAGS, "--max-half-sent-mb", "16") as server:
        for _ in range(3):
            server.post("/v1/completions", BODY, headers=KEY)
        check_attack(server, 150, 3.0, quick=2.0, bound=64 * 2**20)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_thousand_connections_before_keys(model: Path) -> None:
    with ServerProcess(model, *FLAGS) as server:
        for _ in range(3):
            server.post("/v1/completions", BODY, headers=KEY)
        check_attack(server, 1000, 30.0, quick=1.0, bound=192 * 2**20)


def test_endings_are_noticed(counted: ServerProcess) -> None:
    """Half-sent requests whose clients have left are not counted any more."""
    for _ in range(3):
        with connections(counted, 4) as slow:
            for each in slow:
                each.sendall(raw_request({**BODY, "user": "x" * 300_000})[:-20])
    with connections(counted, 1) as [last]:
        last.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        wait_for_ends([last], 5)
