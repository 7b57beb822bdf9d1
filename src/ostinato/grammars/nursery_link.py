"""The engine's end of the nursery: starts it, makes it fork processes, and notices when it dies or hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from .limits import GrammarLimits
from .nursery import READY
from .process import GrammarProcess
from .worker import WorkerLimits

_START_SECONDS = 60.0
_BIRTH_SECONDS = 2.0
_PACKAGE_FOLDER = Path(__file__).parents[2]


class NurseryLink:
    """One nursery from its start to its end."""

    def __init__(self, pack_vocabulary: Callable[[], int]) -> None:
        """Start a nursery, in a thread: listing a vocabulary takes longer than a step."""
        self._pack = pack_vocabulary
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._births: deque[GrammarProcess] = deque()
        self._waits_since = time.monotonic()
        self.is_ready = False
        """Whether it can fork."""
        self.error: str | None = None
        """Why it can no longer be used."""
        self.is_hopeless = False
        """Whether another one would fail too."""
        self._starter = threading.Thread(target=self._start, name="ostinato-nursery", daemon=True)
        self._starter.start()

    def _start(self) -> None:
        try:
            vocabulary = self._pack()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                handed = (theirs.fileno(), vocabulary)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "ostinato.grammars.nursery", *map(str, handed)],
                    pass_fds=handed,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # the library's warnings are about untrusted input
                    env=_environment(),
                )
            finally:
                theirs.close()
                os.close(vocabulary)
            ours.setblocking(False)
            self._control = ours
        except Exception as error:
            self.error, self.is_hopeless = f"structured outputs are not available: {error}", True

    @property
    def descriptor(self) -> int | None:
        """Readable when there is news; None while it does not exist."""
        return None if self._control is None or self.error is not None else self._control.fileno()

    def spawn(self, process: GrammarProcess, limits: GrammarLimits) -> None:
        """Have a process forked; sets `error` on failure."""
        assert self._control is not None
        channel, memory = process.hand_over()
        try:
            handed = WorkerLimits(
                limits.memory_mb * 2**20, 2 * limits.compile_seconds, 2 * limits.mask_seconds
            )
            socket.send_fds(self._control, [json.dumps(handed).encode()], [channel.fileno(), memory])
        except OSError as error:
            self.error = f"the nursery of grammars is gone: {error}"
            return
        finally:
            channel.close()
            os.close(memory)
        if not self._births:
            self._waits_since = time.monotonic()
        self._births.append(process)

    def attend(self) -> None:
        """Process what it has sent, and check that it still responds."""
        if self._control is None or self.error is not None:
            return
        while self._receive(self._control):
            pass
        limit = _BIRTH_SECONDS if self.is_ready else _START_SECONDS
        is_awaited = self._births or not self.is_ready
        if self.error is None and is_awaited and time.monotonic() - self._waits_since > limit:
            self.error = "the nursery of grammars does not answer"

    def _receive(self, control: socket.socket) -> bool:
        try:
            packet, handles, _, _ = socket.recv_fds(control, 4096, 1)
        except BlockingIOError:
            return False
        except OSError:
            packet, handles = b"", []
        self._waits_since = time.monotonic()
        if packet == READY:
            self.is_ready = True
        elif packet in (b"born", b"gone"):
            self._births.popleft().born(handles[0] if handles else None)
        else:
            self.is_hopeless = bool(packet)
            self.error = packet.decode(errors="replace") or "the nursery of grammars has ended"
        return self.error is None

    def close(self) -> None:
        """End it, and with it everything that it has forked."""
        self._starter.join()
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            self._process.wait()


def _environment() -> dict[str, str]:
    """The environment of a process that finds this package, whatever the current folder is, with one
    thread."""
    paths = [str(_PACKAGE_FOLDER), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",  # more arenas reserve address space, which is what is limited
    }
