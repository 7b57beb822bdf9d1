"""A server that cannot end itself is ended: within grace and two seconds of a signal, or when it stalls."""

import contextlib
import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from grammars.processes import children, is_alive

from .server_process import ServerProcess


@pytest.fixture(autouse=True)
def servers_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def halt(server: ServerProcess, how: str) -> None:
    with pytest.raises(httpx.TimeoutException):
        httpx.get(f"{server.url}/halt?how={how}", timeout=0.5)


@pytest.mark.parametrize("how", ["loop", "gil"])
def test_a_signal_ends_a_server_that_reads_none(model: Path, how: str) -> None:
    with ServerProcess(model, "--grace-seconds", "0.5", module="server.holding_server") as server:
        engine = server.engine_pid
        halt(server, how)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == -signal.SIGKILL
        assert time.monotonic() - began < 0.5 + 2 + 0.5, "and half a second for the machine"
        assert "did not end within" in server.log
        wait_for_end(engine)


def test_a_server_that_stands_still_is_ended(model: Path) -> None:
    with ServerProcess(model, "--stall-timeout", "1.5", module="server.holding_server") as server:
        engine = server.engine_pid
        time.sleep(2)
        assert server.get("/health").status_code == 200
        halt(server, "gil")
        assert server.process.wait(10) == -signal.SIGKILL
        assert "stood still for 1.5 s" in server.log
        wait_for_end(engine)


def test_a_guard_that_is_killed_is_replaced(model: Path) -> None:
    with ServerProcess(model, "--grace-seconds", "0.5", module="server.holding_server") as server:
        first = wait_for_guard(server)
        os.kill(first, signal.SIGKILL)
        assert wait_for_guard(server, other_than=first)
        assert not is_alive(first)
        assert server.get("/health").status_code == 200
        halt(server, "gil")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == -signal.SIGKILL


def wait_for_guard(server: ServerProcess, other_than: int = 0) -> int:
    end = time.monotonic() + 15
    while True:
        for child in children(server.process.pid):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                if child != other_than and b"ostinato.server.guard" in command:
                    return child
        assert time.monotonic() < end
        time.sleep(0.05)


def wait_for_end(process: int) -> None:
    end = time.monotonic() + 3
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
