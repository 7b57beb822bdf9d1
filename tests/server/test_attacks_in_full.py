"""A stranger attacks with all there is: the full figures, on servers with their usual limits."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch

from .attacks import (
    PATHOLOGICAL,
    Footprint,
    Witness,
    connections,
    has_ended,
    pathological,
    raw_request,
    settled,
    wait_for_ends,
)
from .server_process import SMALL, ServerProcess
from .test_attacks import BODY, LONG, REFUSED_TEXTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GRACE = 2


@pytest.fixture(scope="module")
def usual(model: Path) -> Iterator[ServerProcess]:
    with ServerProcess(model, "--grace-seconds", str(GRACE)) as server:
        for size in (3_000, 100_000):
            server.post("/tokenize", {"prompt": "x" * size})
        yield server


def ends_in_time(server: ServerProcess, grace: float) -> None:
    """SIGTERM; the code is 0, and the time what it may be."""
    server.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert server.process.wait(grace + 20) == 0
    seconds = time.monotonic() - began
    print(f"ended {seconds:.2f} s after SIGTERM")
    assert seconds < grace + 2


def test_five_thousand_silent_connections(model: Path) -> None:
    """With room for all of them they are closed in time; with room for a tenth they make room."""
    for most in (8192, 500):
        with ServerProcess(model, "--max-connections", str(most), "--grace-seconds", str(GRACE)) as server:
            server.post("/v1/completions", {**BODY, "stream": True})
            before = Footprint.of(server)
            with Witness(server) as witness, connections(server, 5000) as silent:
                print("footprint with all of them:", Footprint.of(server), "before:", before)
                for _ in range(10):
                    assert server.post("/v1/completions", BODY).status_code == 200
                wait_for_ends(silent, 45)
            witness.check()
            print("afterwards:", settled(server, before, 30))
            with connections(server, 300):
                ends_in_time(server, GRACE)


def test_a_thousand_slow_connections(model: Path) -> None:
    """Half of them are slow with their headers, half with their bodies."""
    with ServerProcess(model, "--client-timeout", "10", "--grace-seconds", str(GRACE)) as server:
        server.post("/v1/completions", {**BODY, "stream": True})
        before = Footprint.of(server)
        head = raw_request({**BODY, "user": "x" * 2000})
        with Witness(server) as witness, connections(server, 1000) as slow:
            for at, each in enumerate(slow):
                each.sendall(head[:20] if at % 2 else head[:-1900])
            end = time.monotonic() + 25
            left = slow
            while left := [each for each in left if not has_ended(each)]:
                assert time.monotonic() < end, f"{len(left)} are still there"
                for each in left:
                    with contextlib.suppress(OSError):
                        each.send(b"x")
                time.sleep(0.5)
        witness.check()
        print("afterwards:", settled(server, before, 30), "before:", before)
        ends_in_time(server, GRACE)


def test_clients_that_never_read(usual: ServerProcess) -> None:
    usual.wait_until_idle()
    before = Footprint.of(usual)
    asked = raw_request({**LONG, "prompt": ["a"] * 2, "logprobs": 20, "stream": True})
    deaf = []
    for _ in range(100):
        each = socket.socket()
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        each.connect(("127.0.0.1", usual.port))
        each.sendall(asked)
        deaf.append(each)
    with Witness(usual, stream=False) as witness:  # the engine is busy with their answers
        time.sleep(10)
    witness.check()
    print("afterwards:", settled(usual, before, 90), "before:", before)
    for each in deaf:
        each.close()
    usual.wait_until_idle()


def test_eight_megabytes_of_every_kind(usual: ServerProcess) -> None:
    """To every endpoint that reads text, several at a time."""
    before = Footprint.of(usual)
    # In JSON a newline is two bytes.
    bodies = {
        kind: pathological(kind, 3_700_000 if kind == "newlines" else 7_500_000) for kind in PATHOLOGICAL
    }
    wrong: list[str] = []

    def send(kinds: list[str]) -> None:
        for kind in kinds:
            for path, body in REFUSED_TEXTS.items():
                answer = httpx.post(usual.url + path, json=body(bodies[kind]), timeout=120)
                if answer.status_code not in (400, 503):
                    wrong.append(f"{path} {kind}: {answer.status_code}")
            for part in (1, 10):  # more tokens than are told, and fewer
                text = bodies[kind][: len(bodies[kind]) // part]
                answer = httpx.post(f"{usual.url}/tokenize", json={"prompt": text}, timeout=200)
                if answer.status_code != (400 if part == 1 else 200):
                    wrong.append(f"/tokenize {kind}: {answer.status_code} {answer.text[:200]}")

    names = list(PATHOLOGICAL)
    threads = [threading.Thread(target=send, args=(names[at::3],)) for at in range(3)]
    with Witness(usual) as witness:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    witness.check()
    print("afterwards:", settled(usual, before, 90), "before:", before)


def test_long_texts_of_others_do_not_delay_short_ones(usual: ServerProcess) -> None:
    """While the longest are tokenised, a prompt of a few kilobytes is not."""
    text = pathological("no spaces", 7_000_000)
    ask = partial(httpx.post, f"{usual.url}/tokenize", json={"prompt": text}, timeout=300)
    others = [threading.Thread(target=ask) for _ in range(3)]
    usually = short_texts(usual)
    for thread in others:
        thread.start()
    time.sleep(1)
    meanwhile = short_texts(usual)
    for thread in others:
        thread.join()
    print("short ones took:", usually, "and meanwhile", meanwhile)
    assert meanwhile[5] < 3 * usually[5] + 0.5
    assert meanwhile[-1] < 3 * usually[-1] + 2


def short_texts(server: ServerProcess) -> list[float]:
    """Seconds that each of some short texts takes, in order."""
    times = []
    for _ in range(10):
        began = time.monotonic()
        assert server.post("/tokenize", {"prompt": "x" * 5000}).json()["count"] == 5000
        times.append(round(time.monotonic() - began, 3))
    return sorted(times)


def test_the_usual_server_ends(usual: ServerProcess) -> None:
    """The last one with this server, in the middle of tokenising."""
    text = pathological("no spaces", 7_000_000)

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{usual.url}/tokenize", json={"prompt": text}, timeout=60)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(1.5)
    ends_in_time(usual, GRACE)
    asking.join()
    assert "Traceback" not in usual.log


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_an_engine_is_lost_under_load_and_another_one_serves(model: Path, number: signal.Signals) -> None:
    from .test_faults import read_stream

    async def told(server: ServerProcess) -> list:
        import aiohttp

        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as client:
            streams = [asyncio.create_task(read_stream(client, server.url, LONG)) for _ in range(60)]
            while (await asyncio.to_thread(server.engine_statistics))["running"] == 0:
                await asyncio.sleep(0.02)
            os.kill(server.engine_pid, number)
            return list(await asyncio.gather(*streams))

    flags = ("--restart-engine", "--heartbeat-timeout", "2", "--grace-seconds", str(GRACE))
    with ServerProcess(model, *flags) as server:
        with Witness(server, stream=False) as witness:
            ended = asyncio.run(told(server))
        assert any(error is not None for _, error in ended)
        assert witness.seen["health"] < 0.5 + witness.seen["control"] * 2 + 0.5
        end = time.monotonic() + 60
        while server.get("/health").status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.1)
        assert server.post("/v1/completions", BODY).json()["choices"][0]["text"] == "bcd"
        ends_in_time(server, GRACE)


def test_nothing_is_left_in_the_temporary_folder(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill of the server, of the engine, and of the server while it starts."""
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())  # this process keeps its own
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for who in ("server", "engine", "start"):
        with ServerProcess(model, wait=who != "start") as server:
            if who == "start":
                time.sleep(0.5)
            os.kill(server.engine_pid if who == "engine" else server.process.pid, signal.SIGKILL)
            server.process.wait(20)
            end = time.monotonic() + 10
            while left := list(tmp_path.iterdir()):
                assert time.monotonic() < end, (who, left)
                time.sleep(0.05)


def test_signals_at_any_moment_of_the_start(model: Path) -> None:
    """No traceback, no hang, whether the process alone is told or its whole group."""
    chance = random.Random(1)
    command = [sys.executable, "-m", "ostinato", "serve", "--model", str(model), "--port", "0", *SMALL]
    for at in range(24):
        number = signal.SIGINT if at % 4 == 3 else signal.SIGTERM
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        # Before it has read anything of ours, Python itself tells where Ctrl-C found it.
        time.sleep(chance.uniform(1.0 if number == signal.SIGINT else 0.0, 8.0))
        (os.killpg if at % 2 else os.kill)(process.pid, number)
        _, said = process.communicate(timeout=20)
        assert "Traceback" not in said, said


def test_two_first_starts_on_one_empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file that has to be converted first: one of them does it, and both serve the result."""
    from models.small_gguf import write_gguf
    from models.small_models import reference_model

    cache = tmp_path / "cache"
    monkeypatch.setenv("OSTINATO_CACHE", str(cache))
    reference = reference_model("llama")
    file = write_gguf(reference, tmp_path / "model.gguf")
    prompt = [3, 1, 4, 1, 5]
    wanted = reference.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=-1)
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    flags = ("--max-model-len", "64")
    first, second = ServerProcess(file, *flags), ServerProcess(file, *flags)
    with first, second:
        for server in (first, second):
            [choice] = server.post("/v1/completions", body).json()["choices"]
            assert choice["token_ids"] == wanted[0, len(prompt) :].tolist()
    assert len(list((cache / "gguf").iterdir())) == 1, "one result, and nothing half done beside it"
