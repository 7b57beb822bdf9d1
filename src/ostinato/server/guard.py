"""Ends a server that cannot end itself: its event loop stands still, or a C function holds the interpreter.

The guard is a small process. The server blocks SIGINT and SIGTERM in all its threads and reads them from a
descriptor in its event loop (signalfd), so a signal that nobody reads stays pending, and the kernel says so
in /proc: no line of Python has to run in the server for the guard to know. It counts the time from then on,
or from the server's own word that it is leaving, and kills it when the time is over. It also hears the event
loop's heartbeat. Whatever the server has started dies with it. A guard that is killed is replaced.

`python -m ostinato.server.guard SERVER DESCRIPTOR LEAVE_SECONDS STALL_SECONDS` is the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .log_lines import announce
from .parent_death import die_with_parent

SIGNALS = (signal.SIGINT, signal.SIGTERM)
BEAT_SECONDS = 0.5
PAUSE_SECONDS = 5.0
"""Between the starts of two guards."""
_LOOK_SECONDS = 0.25
_MASK_BYTES = 8
_SFD_NONBLOCK_CLOEXEC = 0o2004000
_SIGNAL_INFO_BYTES = 128
_BEAT, _LEAVING = b"b", b"l"


class Guard:
    """The server's side of it. Make it before there are threads, `watch` in the event loop."""

    def __init__(self, leave_seconds: float, stall_seconds: float) -> None:
        """`leave_seconds`: that the process has after a signal. `stall_seconds`: that its event loop may
        stand still."""
        self._seconds = (leave_seconds, stall_seconds)
        self._pipe = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._is_leaving = False
        if sys.platform == "linux":
            self._start()

    def _start(self) -> None:
        self._began = time.monotonic()
        heard, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        given = (os.getpid(), heard, *self._seconds)
        # A stop of the whole process group is not for the guard.
        blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *map(str, given)],
                stdin=subprocess.DEVNULL,
                pass_fds=(heard,),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
            os.close(heard)

    def watch(self, on_signal: Callable[[], None]) -> None:
        """Calls back for each signal, and lets the guard hear that the loop runs."""
        loop = asyncio.get_running_loop()
        if self._process is None:
            for number in SIGNALS:
                loop.add_signal_handler(number, on_signal)
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        mask = sum(1 << (number - 1) for number in SIGNALS).to_bytes(_MASK_BYTES, sys.byteorder)
        signals = ctypes.CDLL(None, use_errno=True).signalfd(
            -1, mask.ljust(128, b"\0"), _SFD_NONBLOCK_CLOEXEC
        )
        if signals < 0:
            raise OSError(ctypes.get_errno(), "signalfd")

        def read() -> None:
            while True:
                try:
                    os.read(signals, _SIGNAL_INFO_BYTES)
                except BlockingIOError:
                    return
                self._is_leaving = True
                self._say(_LEAVING)
                on_signal()

        def beat() -> None:
            self._look_after_guard()
            self._say(_BEAT)
            loop.call_later(BEAT_SECONDS, beat)

        loop.add_reader(signals, read)
        beat()

    def _say(self, word: bytes) -> None:
        # It may be full while the guard is stopped, and nobody reads it until the next look at the guard.
        with contextlib.suppress(OSError):
            os.write(self._pipe, word)

    def _look_after_guard(self) -> None:
        assert self._process is not None
        if self._process.poll() is None or time.monotonic() - self._began < PAUSE_SECONDS:
            return
        announce("the guard process ended; starting another one")
        if self._pipe != -1:
            os.close(self._pipe)
        self._pipe = -1
        try:
            self._start()
        except OSError as error:  # no process or descriptor is left for it: tried again in a while
            announce(f"cannot start a guard process: {error.strerror or error}")
        if self._is_leaving:
            self._say(_LEAVING)


def main(server: int, heard: int, leave_seconds: float, stall_seconds: float) -> None:
    """The guard's process."""
    die_with_parent()
    why = _why_to_kill(server, heard, leave_seconds, stall_seconds)
    if why is not None and os.getppid() == server:
        announce(f"{why}: killed")
        os.kill(server, signal.SIGKILL)


def _why_to_kill(server: int, heard: int, leave_seconds: float, stall_seconds: float) -> str | None:
    """Returns when the server is gone, or has to go."""
    told_at: float | None = None
    silent, has_begun = 0.0, False
    before = time.monotonic()
    while os.getppid() == server:
        readable, _, _ = select.select([heard], [], [], _LOOK_SECONDS)
        now = time.monotonic()
        # If the guard itself stood still, so did the machine, and the server's words are yet to come.
        silent, before = silent + min(now - before, 2 * _LOOK_SECONDS), now
        if readable:
            if not (words := os.read(heard, 4096)):
                return None
            silent, has_begun = 0.0, True
            if _LEAVING in words:
                told_at = told_at or now
        if told_at is None and _has_pending_signal(server):
            told_at = now
        if told_at is not None and now - told_at >= leave_seconds:
            return f"the server did not end within {leave_seconds:g} s of a signal"
        if has_begun and silent >= stall_seconds:
            return f"the HTTP process stood still for {stall_seconds:g} s"
    return None


def _has_pending_signal(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False
    pending = 0
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name in ("SigPnd", "ShdPnd"):
            pending |= int(value, 16)
    return any(pending >> (number - 1) & 1 for number in SIGNALS)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
