"""Tenants beside each other: a hostile one takes nothing from another that is below its share."""

from __future__ import annotations

import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from grammars.hostile import never_compiles

from .server_process import ServerProcess

GOOD, BAD = {"Authorization": "Bearer good-key"}, {"Authorization": "Bearer bad-key"}
ROUNDS = 7


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    keys = [{"name": name, "key": f"{name}-key"} for name in ("good", "bad")]
    file.write_text(json.dumps({"keys": keys}))
    file.chmod(0o600)
    with ServerProcess(model, "--api-keys-file", str(file), "--grammar-compile-seconds", "4") as server:
        yield server


def seconds_to_first_token(server: ServerProcess, **fields: object) -> float:
    body = {"prompt": "a", "max_tokens": 4, "temperature": 0, "stream": True, **fields}
    began = time.perf_counter()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=GOOD, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        next(line for line in answer.iter_lines() if line.startswith("data: "))
        return time.perf_counter() - began


def median_of(server: ServerProcess, **fields: object) -> float:
    return statistics.median(seconds_to_first_token(server, **fields) for _ in range(ROUNDS))


def seconds_per_step(server: ServerProcess) -> float:
    before, began = server.engine_statistics()["steps"], time.perf_counter()
    time.sleep(2)
    return (time.perf_counter() - began) / max(1, server.engine_statistics()["steps"] - before)


@contextmanager
def attacked(server: ServerProcess, connections: int, *bodies: dict[str, object]) -> Iterator[None]:
    """Connections of the hostile key, each of which asks again when it is answered or refused."""
    is_over = threading.Event()

    def ask(number: int) -> None:
        body = json.dumps(bodies[number % len(bodies)]).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {BAD['Authorization']}\r\n"
        head += f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        while not is_over.is_set():
            with socket.create_connection(("127.0.0.1", server.port)) as client, suppress(OSError):
                client.sendall(head.encode() + body)
                client.settimeout(0.2)
                is_open = True
                while is_open and not is_over.is_set():
                    with suppress(TimeoutError):
                        is_open = bool(client.recv(65536))
            is_over.wait(0.2)

    with ThreadPoolExecutor(connections) as pool:
        asking = [pool.submit(ask, number) for number in range(connections)]
        try:
            yield
        finally:
            is_over.set()
            for each in asking:
                each.result()


def test_a_tenant_with_40_connections_of_128_completions(shared: ServerProcess) -> None:
    alone = median_of(shared)
    # Its choices are not streamed: their events alone would keep this machine busy, client and server.
    hostile: dict[str, object] = {"prompt": "b", "n": 128, "max_tokens": 200, "ignore_eos": True}
    with attacked(shared, 40, hostile):
        while shared.engine_statistics()["waiting"] < 3000:
            time.sleep(0.1)
        step = seconds_per_step(shared)
        beside = median_of(shared)
        metrics = shared.get("/metrics").text
    assert beside <= 2 * alone + step, (alone, step, beside)
    assert 'tenant_requests_waiting{model_name="scripted",tenant="bad"}' in metrics
    shared.wait_until_idle()


def test_a_tenant_with_32_slow_grammars(shared: ServerProcess) -> None:
    def small(number: int) -> dict[str, object]:
        return {"response_format": {"type": "regex", "regex": f"[b-z]{{{number + 3}}}"}}

    def median(first: int) -> float:
        numbers = range(first, first + ROUNDS)
        return statistics.median(seconds_to_first_token(shared, **small(number)) for number in numbers)

    alone = median(0)
    slow: list[dict[str, object]] = [
        {"prompt": "b", "max_tokens": 5, "guided_json": never_compiles(number)} for number in range(32)
    ]
    with attacked(shared, 32, *slow):
        while shared.engine_statistics()["waiting"] < 30:
            time.sleep(0.1)
        time.sleep(0.5)
        beside = median(ROUNDS)
    # Compiling takes all cores of the machine, on which this process runs, too.
    assert beside <= 2 * alone + 0.25, (alone, beside)
