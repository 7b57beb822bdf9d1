"""Processes, forked from this one, that compile kernels into the caches on disk.

Most of a compilation by Triton is Python, so threads would take turns. A child touches no CUDA and ends
without cleaning up. What a child did not get done (it may hang, forked while another thread held a lock) is
left to this process, which also tells what is wrong with it.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import logging
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("ostinato.kernels")

_PATIENCE_SECONDS = 60.0
_MOST = 16
_SIGNAL_OF_PARENT = 1  # PR_SET_PDEATHSIG
_NUMBER_BYTES = 2
"""Of a job: all numbers together must fit into a pipe, which takes 64 KiB."""


class Job(NamedTuple):
    """A compilation whose result stays on disk."""

    cost: int
    """How long it takes, compared with others: mostly the length of its source."""
    compile: Callable[[], Any]


class CompilingProcesses:
    """As many as there are processors, at most; none where one is all there is."""

    def __init__(self) -> None:
        self._limit = min(_MOST, os.cpu_count() or 1)
        self._children: list[int] = []
        self._claims: tempfile.TemporaryDirectory[str] | None = None

    def begin(self, unsorted_jobs: Iterable[Job]) -> None:
        """Have children compile these while this process goes on. Its other threads should hold no locks."""
        # Some kernels take ten times as long as others: those come first, and who is free takes the next.
        jobs = sorted(unsorted_jobs, key=lambda job: job.cost, reverse=True)
        self._forget_those_that_ended()
        count = min(max(1, self._limit - len(self._children)), len(jobs))
        if not jobs or self._limit < 2 or not hasattr(os, "fork"):
            return
        parent = os.getpid()
        try:
            if self._claims is None:
                self._claims = tempfile.TemporaryDirectory()
            claims = Path(self._claims.name)
            with _given_out(len(jobs)) as numbers, warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # about threads: see above
                for _ in range(count):
                    child = os.fork()
                    if child == 0:
                        _work_and_exit(jobs, numbers, claims, parent)
                    self._children.append(child)
        except OSError as error:  # no room for a process, or for a file
            logger.warning("kernels are compiled by fewer processes than there are processors: %s", error)

    def wait(self) -> None:
        """Until all have ended, or for so long."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._children and time.monotonic() < deadline:
            self._forget_those_that_ended()
            time.sleep(0.005)
        if self._children:
            logger.warning("processes that compile kernels are given up after %.0f s", _PATIENCE_SECONDS)

    def end(self) -> None:
        """Leave no child behind."""
        self._forget_those_that_ended()  # their numbers may be others' by now
        for child in self._children:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, 9)
                os.waitpid(child, 0)
        self._children.clear()
        if self._claims is not None:
            self._claims.cleanup()
            self._claims = None

    def _forget_those_that_ended(self) -> None:
        self._children[:] = [child for child in self._children if not _has_ended(child)]


@contextmanager
def _given_out(count: int) -> Iterator[int]:
    """Opens a pipe with the numbers from 0 on, each of which one process reads."""
    numbers, given = os.pipe()
    try:
        with open(given, "wb") as file:
            file.write(b"".join(number.to_bytes(_NUMBER_BYTES, "little") for number in range(count)))
        yield numbers
    finally:
        os.close(numbers)


def _has_ended(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] != 0
    except ChildProcessError:  # somebody else has waited for it
        return True


def _work_and_exit(jobs: Sequence[Job], numbers: int, claims: Path, parent: int) -> None:
    try:
        _die_with(parent)
        gc.disable()  # collecting here what belongs to CUDA would call it
        while number := os.read(numbers, _NUMBER_BYTES):
            with suppress(Exception):  # the parent comes to it too, and tells
                compiled = jobs[int.from_bytes(number, "little")].compile()
                if hasattr(compiled, "metadata"):
                    _build_launcher(compiled, claims)
    finally:
        os._exit(0)  # whatever is missing is compiled by the parent, which also tells what is wrong with it


def _die_with(parent: int) -> None:
    """A parent that is killed cannot end this process, which has its memory on the GPU and its sockets."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENT, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)


def _build_launcher(kernel: Any, claims: Path) -> None:
    """Triton 3.6 has a C compiler build what launches kernels with such arguments, and keeps that as well.

    Of all children one does it: whoever is first to make a file of that name.
    """
    import triton

    types = repr(list(kernel.src.signature.values()))
    with suppress(FileExistsError):
        (claims / hashlib.sha256(types.encode()).hexdigest()).touch(exist_ok=False)
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
