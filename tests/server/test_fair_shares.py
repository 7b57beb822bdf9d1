"""Tenants beside each other: a hostile one takes nothing from another that is below its share."""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from grammars.hostile import never_compiles

from .server_process import ServerProcess

GOOD = {"Authorization": "Bearer good-key"}
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
def asking(
    server: ServerProcess, key: str, connections: int, *bodies: dict[str, object], pause: float = 0.2
) -> Iterator[None]:
    """Connections of a key, each of which asks again when it is answered or refused."""
    is_over = threading.Event()

    def ask(number: int) -> None:
        body = json.dumps(bodies[number % len(bodies)]).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        while not is_over.is_set():
            with socket.create_connection(("127.0.0.1", server.port)) as client, suppress(OSError):
                client.sendall(head.encode() + body)
                client.settimeout(0.2)
                is_open = True
                while is_open and not is_over.is_set():
                    with suppress(TimeoutError):
                        is_open = bool(client.recv(65536))
            is_over.wait(pause)

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
    with asking(shared, "bad-key", 40, hostile):
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
    with asking(shared, "bad-key", 32, *slow):
        while shared.engine_statistics()["waiting"] < 30:
            time.sleep(0.1)
        time.sleep(0.5)
        beside = median(ROUNDS)
    # Compiling takes all cores of the machine, on which this process runs, too.
    assert beside <= 2 * alone + 0.25, (alone, beside)


def tokens_of(server: ServerProcess) -> dict[str, float]:
    """Tokens by tenant, prompts and answers."""
    found: dict[str, float] = {}
    pattern = r'ostinato:tenant_(?:prompt|generation)_tokens_total\{.*tenant="([^"]+)".*\} (\S+)'
    for name, count in re.findall(pattern, server.get("/metrics").text):
        found[name] = found.get(name, 0.0) + float(count)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_tenants_have_the_shares_of_their_weights(model: Path, tmp_path: Path) -> None:
    """For ten minutes, or OSTINATO_SHARES_SECONDS."""
    weights = {f"t{at}": float(weight) for at, weight in enumerate((1, 1, 1, 1, 1, 2, 2, 2, 3, 3))}
    file = tmp_path / "keys.json"
    keys = [{"name": name, "key": f"{name}-key", "weight": weight} for name, weight in weights.items()]
    file.write_text(json.dumps({"keys": keys}))
    file.chmod(0o600)
    with ServerProcess(model, "--api-keys-file", str(file)) as server, ExitStack() as stack:
        for at, name in enumerate(weights):
            # Short answers and long ones, long prompts and short ones, always more than the share.
            body: dict[str, object] = {"prompt": "x" * (1 + 7 * at), "n": 8, "ignore_eos": True}
            body["max_tokens"] = (10, 150, 40)[at % 3]
            stack.enter_context(asking(server, f"{name}-key", 4, body, pause=0.01))
        time.sleep(10)
        before = tokens_of(server)
        time.sleep(float(os.environ.get("OSTINATO_SHARES_SECONDS", "600")))
        used = {name: count - before[name] for name, count in tokens_of(server).items()}
    total = sum(used.values())
    shares = {name: used[name] / total / (weight / sum(weights.values())) for name, weight in weights.items()}
    assert all(0.9 <= share <= 1.1 for share in shares.values()), shares
    print(f"tokens over what the weights say, of {total:,.0f}:", shares)
