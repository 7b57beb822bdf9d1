"""Attacks on a server and what is measured meanwhile and afterwards. All of it stays on loopback."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from .server_process import ServerProcess

HEALTH_SECONDS = 0.5
GAP_SECONDS = 1.0
MOST_SLOWDOWN = 6.0
"""On a machine that is busier with other things than this, nothing can be said."""
QUIET = 0.1
"""Where others take less of the cores, the limits are as they stand."""


class Witness:
    """A bystander of an attack: see `attack_witness`."""

    def __init__(self, server: ServerProcess, *, stream: bool = True) -> None:
        script = Path(__file__).with_name("attack_witness.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(server.port), "stream" if stream else "health"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.seen: dict[str, Any] = {}

    def __enter__(self) -> "Witness":
        time.sleep(0.3)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        said, _ = self._process.communicate("", timeout=30)
        self.seen = json.loads(said.splitlines()[-1])
        print("seen:", {name: round(value, 3) for name, value in self.seen.items() if name != "failures"})

    def check(self) -> None:
        """Nobody was held up, beyond what processes outside the test did.

        If these took a share of the cores, all that the server does takes so much longer, and a control that
        does next to nothing tells how late it is woken.
        """
        seen = self.seen
        is_quiet = seen["others"] < QUIET
        slowdown = 1.0 if is_quiet else 1 / max(1 - seen["others"], 1 / MOST_SLOWDOWN)
        noise = 0.0 if is_quiet else max(seen["control"], seen["control_gap"])
        assert not seen["failures"], seen
        assert seen["num_health"] >= 3, seen
        assert seen["health"] <= HEALTH_SECONDS * slowdown + noise, seen
        assert seen["gap"] <= GAP_SECONDS * slowdown + noise, seen
        assert seen["first"] <= GAP_SECONDS * slowdown + noise, seen


@dataclass(frozen=True)
class Footprint:
    """What a server uses."""

    private_bytes: int
    descriptors: int

    @staticmethod
    def of(server: ServerProcess) -> "Footprint":
        """Both processes' memory, and the open descriptors of the one that has clients."""
        size = sum(private_bytes(pid) for pid in (server.process.pid, server.engine_pid))
        return Footprint(size, len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())))


def private_bytes(pid: int) -> int:
    """Memory of a process that is its own."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Private_"))


def settled(server: ServerProcess, before: Footprint, seconds: float, memory: float = 0.1) -> Footprint:
    """The footprint once it is what it was; an error if it does not become that within so many seconds."""
    end = time.monotonic() + seconds
    while True:
        now = Footprint.of(server)
        if now.descriptors <= before.descriptors and now.private_bytes <= before.private_bytes * (1 + memory):
            return now
        assert time.monotonic() < end, (before, now)
        time.sleep(0.2)


@contextlib.contextmanager
def connections(server: ServerProcess, count: int) -> Iterator[list[socket.socket]]:
    """So many sockets, connected and silent."""
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            opened.append(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        yield opened
    finally:
        for each in opened:
            each.close()


def raw_request(body: Any, path: str = "/v1/completions", *, close: bool = False) -> bytes:
    """The bytes of a POST."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    last = "Connection: close\r\n" if close else ""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{last}"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content


def has_ended(connection: socket.socket) -> bool:
    """Whether the server has closed a connection; what it had to say before is thrown away."""
    connection.setblocking(False)
    try:
        while connection.recv(65536):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def wait_for_ends(connections: list[socket.socket], seconds: float) -> None:
    """Wait until the server has closed all of them."""
    end, left = time.monotonic() + seconds, connections
    while left := [each for each in left if not has_ended(each)]:
        assert time.monotonic() < end, f"{len(left)} of {len(connections)} are still open"
        time.sleep(0.05)


PATHOLOGICAL = {
    "one letter": "a",
    "no spaces": "aZ9_" * 16 + "qx",
    "emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "combining": "e\u0301\u0302\u0303\u0304",
    "spaces": " ",
    "newlines": "\n",
}


def pathological(kind: str, size: int) -> str:
    """A text of about so many bytes in UTF-8."""
    unit = PATHOLOGICAL[kind]
    return unit * (size // len(unit.encode()))
