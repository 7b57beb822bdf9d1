"""The process of one grammar, forked from the nursery: compiles it, then follows the texts under it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from ostinato.text.errors import GrammarError

from .layout import CURRENT, PACKET_BYTES, Command, SharedMemory, Verdict
from .library import Library
from .specification import checked

_COMPILING_NICENESS = 5
_LONG_NICENESS = 19
_SHORT_SECONDS = 0.1
"""A grammar that takes longer to compile gives way to others."""
_LOOK_SECONDS = 0.05
_SIGNAL_OF_PARENT = 1  # PR_SET_PDEATHSIG


class WorkerLimits(NamedTuple):
    """What this process may use, as sent by the engine."""

    memory_bytes: int
    """Beyond what it uses when it is forked."""
    compile_seconds: float
    mask_seconds: float
    """CPU time for one packet of commands."""


def die_with_parent(parent: int) -> None:
    """End this process when the one that forked it ends, whatever it is doing."""
    ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def serve(channel: socket.socket, memory: SharedMemory, library: Library, limits: WorkerLimits) -> None:
    """Serve until the other end closes."""
    _limit_memory(limits.memory_bytes)
    _end_after(limits.compile_seconds)
    outcome, compiled = _compiled_aside(library, memory.read_specification(), channel)
    _end_after(0)
    channel.send(json.dumps(outcome).encode())
    if compiled is not None:
        Texts(library, compiled, memory, limits.mask_seconds).follow(channel)


def _end_after(seconds: float) -> None:
    """End by a signal after this much CPU time of this process; 0: never.

    The engine kills a process that takes too long. This is for one that the engine has given up.
    """
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)


def _limit_memory(more: int) -> None:
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + more, taken + more))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _compiled_aside(
    library: Library, specification: bytes, channel: socket.socket
) -> tuple[dict[str, Any], Any]:
    """Compile in a thread of low priority: an attack on this machine's CPU time would slow down its engine.

    If the other end closes meanwhile, the result is no longer needed.
    """
    outcome: dict[str, Any] = {"error": "the grammar could not be compiled"}
    compiled: Any = None

    def compile_it() -> None:
        nonlocal compiled
        os.setpriority(os.PRIO_PROCESS, 0, _COMPILING_NICENESS)  # of this thread, on Linux
        try:
            asked = json.loads(specification)
            compiled = library.compiled(*checked(asked["kind"], asked["text"]))
            outcome.clear()
            outcome["bytes"] = _private_bytes()
        except GrammarError as error:
            outcome["error"] = str(error)
        except MemoryError:
            outcome["error"] = "it takes more memory than a grammar is allowed"

    poller = select.poll()
    poller.register(channel, select.POLLHUP)
    thread = threading.Thread(target=compile_it)
    thread.start()
    long_at = time.monotonic() + _SHORT_SECONDS
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        if time.monotonic() >= long_at and thread.native_id is not None:
            with contextlib.suppress(OSError):  # it has just ended
                os.setpriority(os.PRIO_PROCESS, thread.native_id, _LONG_NICENESS)
        if poller.poll(0):
            os._exit(0)
    return outcome, compiled


def _private_bytes() -> int:
    """0 if the system does not say."""
    try:
        with open("/proc/self/smaps_rollup") as file:
            return 1024 * sum(int(line.split()[1]) for line in file if line.startswith("Private_"))
    except OSError:
        return 0


class Texts:
    """The texts under one compiled grammar, by slot."""

    def __init__(self, library: Library, compiled: Any, memory: SharedMemory, seconds: float) -> None:
        """`seconds`: CPU time that a packet may take."""
        self._library = library
        self._compiled = compiled
        self._memory = memory
        self._seconds = seconds
        self._matchers: dict[int, Any] = {}
        self._last: dict[int, Verdict] = {}

    def follow(self, channel: socket.socket) -> None:
        """Carry out packets of commands until the other end closes."""
        answered = 0
        while packet := channel.recv(2 * PACKET_BYTES):
            _end_after(self._seconds)
            verdicts = self.carry_out(np.frombuffer(packet, dtype=np.int32).tolist())
            _end_after(0)
            if verdicts:
                channel.send(np.array([answered, *verdicts], dtype=np.int32).tobytes())
                answered += len(verdicts)

    def carry_out(self, words: list[int]) -> list[Verdict]:
        """The verdicts of the commands that have one."""
        verdicts: list[Verdict] = []
        at, header = 0, self._memory.header
        while at < len(words):
            command, slot, count = words[at : at + 3]
            tokens = words[at + 3 : at + 3 + count]
            at += 3 + count
            # If the process dies here, this tells which text it died of.
            header[CURRENT] = slot + 1
            if command == Command.FREE:
                self._matchers.pop(slot, None)
            else:
                if command == Command.START:
                    self._matchers[slot] = self._library.matcher(self._compiled)
                    self._last[slot] = Verdict.FOLLOWS
                if self._last[slot] is Verdict.FOLLOWS:
                    self._last[slot] = self._verdict(slot, tokens)
                verdicts.append(self._last[slot])
            header[CURRENT] = 0
        return verdicts

    def _verdict(self, slot: int, tokens: list[int]) -> Verdict:
        matcher = self._matchers[slot]
        try:
            for token in tokens:
                if not matcher.accept_token(token):
                    return Verdict.REFUSED
            if matcher.is_terminated():
                return Verdict.COMPLETE
            mask = self._memory.masks[slot : slot + 1]
            matcher.fill_next_token_bitmask(mask, 0)
        except Exception:
            # An error while following a text, above all lack of memory: for the engine the same as a crash.
            os._exit(1)
        return Verdict.FOLLOWS if mask.any() else Verdict.DEAD_END


def main(channel: socket.socket, memory: SharedMemory, library: Library, limits: WorkerLimits) -> None:
    """Run `serve` as all that a process does; never returns."""
    try:
        serve(channel, memory, library, limits)
    except BaseException as error:
        sys.stderr.write(f"ostinato: a grammar process ends: {type(error).__name__}: {error}\n")
        os._exit(1)
    os._exit(0)
