"""An engine that stands still is noticed, its clients are told, and the server still does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from grammars.processes import is_alive
from ostinato.server.engine_client import connection as connection_module
from ostinato.server.engine_client.client import EngineClient, EngineGone, EngineLimits, EngineState
from ostinato.server.engine_client.connection import EngineConnection
from ostinato.server.engine_process import heartbeat
from ostinato.server.engine_process.heartbeat import Heartbeat
from ostinato.server.wire.messages import Abort, Beat, News, decode_event

from .imported_late import aiohttp
from .server_process import ServerProcess
from .test_faults import LONG, read_stream

HEARTBEAT = 1.0


def test_a_stopped_engine_is_noticed_and_restarts_are_counted(model: Path) -> None:
    async def told(server: ServerProcess) -> tuple[list, float, float]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as client:
            await asyncio.to_thread(server.post, "/pause_generation")
            streams = [asyncio.create_task(read_stream(client, server.url, LONG)) for _ in range(4)]
            plain = [
                asyncio.create_task(client.post(f"{server.url}/v1/completions", json=LONG)) for _ in range(4)
            ]
            while (await asyncio.to_thread(server.engine_statistics))["waiting"] < 8:
                await asyncio.sleep(0.02)
            os.kill(server.engine_pid, signal.SIGSTOP)
            stopped = time.monotonic()
            while (await client.get(f"{server.url}/health")).status == 200:
                await asyncio.sleep(0.02)
            red = time.monotonic() - stopped
            ended = [error for _, error in await asyncio.gather(*streams)]
            for answer in await asyncio.gather(*plain):
                assert answer.status == 503
                assert int(answer.headers["Retry-After"]) > 0
                ended.append((await answer.json())["error"])
            return ended, red, time.monotonic() - stopped

    flags = ("--restart-engine", "--max-engine-restarts", "2", "--heartbeat-timeout", str(HEARTBEAT))
    with ServerProcess(model, *flags) as server:
        first = server.engine_pid
        ended, red, seconds = asyncio.run(told(server))
        assert all("no sign of life for 1 s" in error["message"] for error in ended)
        assert red < HEARTBEAT + 1.5
        assert seconds < HEARTBEAT + 2
        # What dies while it loads again counts too, and is not tried for ever.
        second = wait_for_engine(server, other_than=first)
        os.kill(second, signal.SIGKILL)
        os.kill(wait_for_engine(server, other_than=second), signal.SIGKILL)
        assert server.process.wait(10) == 1
        assert "starting again in 1 s" in server.log
        assert "2 restarts in a row did not help" in server.log
        assert "Traceback" not in server.log


def test_what_is_sent_to_an_engine_that_has_just_ended_is_thrown_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its requests are failed with the others when the end is noticed, and are no failure of the server."""
    monkeypatch.setattr(connection_module, "run_engine", print)  # which ends at once

    async def scenario() -> None:
        connection = EngineConnection({}, lambda event: None)
        assert await connection.ended() == 0
        connection.send(Abort([1]))
        await connection.close()

    asyncio.run(scenario())


def wait_for_engine(server: ServerProcess, other_than: int) -> int:
    """The next engine's process, as soon as there is one."""
    end = time.monotonic() + 10
    while True:
        assert time.monotonic() < end
        with contextlib.suppress(AssertionError, FileNotFoundError):
            if (found := server.engine_pid) != other_than:
                return found
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("grace", "signals"), [("1", 1), ("30", 2)], ids=["grace", "twice"])
def test_a_server_with_a_stopped_engine_ends(model: Path, grace: str, signals: int) -> None:
    """In its grace and two seconds, or at the second signal; nothing is left of either process."""

    async def told(server: ServerProcess) -> dict | None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as client:
            await asyncio.to_thread(server.post, "/pause_generation")
            stream = asyncio.create_task(read_stream(client, server.url, LONG))
            while (await asyncio.to_thread(server.engine_statistics))["waiting"] < 1:
                await asyncio.sleep(0.02)
            os.kill(server.engine_pid, signal.SIGSTOP)
            for _ in range(signals):
                server.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.2)
            return (await stream)[1]

    with ServerProcess(model, "--grace-seconds", grace) as server:
        engine = server.engine_pid
        began = time.monotonic()
        error = asyncio.run(told(server))
        assert error is not None
        assert error["message"] == "the server is shutting down"
        assert server.process.wait(10) == 0
        assert time.monotonic() - began < 1 + 2 + 1
        assert not Path(f"/proc/{engine}").exists()


@pytest.mark.slow
def test_a_stopped_engine_does_not_outlive_a_killed_server(model: Path) -> None:
    with ServerProcess(model) as server:
        engine = server.engine_pid
        os.kill(engine, signal.SIGSTOP)
        server.process.kill()
        server.process.wait()
        end = time.monotonic() + 5
        while is_alive(engine):
            assert time.monotonic() < end
            time.sleep(0.02)


# -- without a server process ----------------------------------------------------------------------


class Listening:
    """Somebody who waits."""

    def __init__(self) -> None:
        self.error: EngineGone | None = None

    def take_token(self, token: int) -> None: ...

    def take_in(self, news: News) -> None: ...

    def fail(self, error: EngineGone) -> None:
        self.error = error


class FakeConnection:
    """An engine's process that says what it is told to say."""

    def __init__(self) -> None:
        self.is_killed = False
        self.process = SimpleNamespace(kill=self.kill)

    def kill(self) -> None:
        self.is_killed = True

    def send(self, command: Any) -> None: ...


Outcome = tuple[bool, EngineGone | None]


async def watched(beats: list[float], limits: EngineLimits, seconds: float = 1.0) -> Outcome:
    """Whether an engine with these beats is killed, and what its client hears."""
    client = EngineClient({}, limits=limits, on_ready=lambda ready: None)
    connection, listening = FakeConnection(), Listening()
    client._connection = connection  # type: ignore[assignment]
    client.state = EngineState.READY
    client.embed([1], "last", listening)
    watch = asyncio.create_task(client._watch(connection))  # type: ignore[arg-type]
    for beat in beats:
        client._on_event(Beat(beat))
        await asyncio.sleep(seconds / len(beats))
    watch.cancel()
    assert (client.state is EngineState.DEAD) == connection.is_killed
    return connection.is_killed, listening.error


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """Of a step that does not end, of one that takes long, and of silence, all watched at the same time."""

    async def scenarios() -> list[Outcome]:
        return await asyncio.gather(
            watched([0.1, 0.6, 1.1, 1.6], EngineLimits(10, 1.5, None)),
            watched([100.0, 400.0, 800.0, 0.1], EngineLimits(0.5, None, None)),
            watched([0.0], EngineLimits(0.5, None, None), seconds=1.5),
        )

    return asyncio.run(scenarios())


def test_a_step_that_does_not_end_is_a_hang(outcomes: list[Outcome]) -> None:
    killed, error = outcomes[0]
    assert killed
    assert "at one step for 1.5 s" in str(error)


def test_a_long_step_is_no_hang(outcomes: list[Outcome]) -> None:
    """A process that says it lives may take its time for a step, on a CPU a quarter of an hour."""
    assert outcomes[1] == (False, None)


def test_silence_is_a_hang(outcomes: list[Outcome]) -> None:
    killed, error = outcomes[2]
    assert killed
    assert "no sign of life for 0.5 s" in str(error)


def test_a_process_that_stood_still_itself_accuses_nobody() -> None:
    async def scenario() -> bool:
        client = EngineClient({}, limits=EngineLimits(1.0, None, None), on_ready=lambda ready: None)
        connection = FakeConnection()
        client._connection = connection  # type: ignore[assignment]
        client.state = EngineState.READY
        watch = asyncio.create_task(client._watch(connection))  # type: ignore[arg-type]
        await asyncio.sleep(0.3)
        time.sleep(1.5)
        client._on_event(Beat(0.0))
        await asyncio.sleep(0.3)
        watch.cancel()
        return connection.is_killed

    assert not asyncio.run(scenario())


def test_heartbeat_tells_how_long_the_loop_is_at_one_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.1)
    context: zmq.Context = zmq.Context()
    heard = context.socket(zmq.PULL)
    address = "inproc://beats"
    heard.bind(address)
    heart = Heartbeat(context, address)
    heart.at_work()
    heart.start()

    def beat() -> float:
        event = decode_event(heard.recv())
        assert isinstance(event, Beat)
        return event.step_seconds

    first, second = beat(), beat()
    assert second >= first + 0.1
    heart.at_rest()
    assert min(beat(), beat()) == 0
    heard.close()
    context.term()
