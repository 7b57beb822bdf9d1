"""Whose turn an engine is: one thread at a time, first come, first served, in the engine's process only."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import ExitStack

from .parameters.sampling_params import RequestError
from .surroundings import left

_num_forks = 0
"""Forks from the first process to this one."""


def _note_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_note_fork)


class Turn:
    """Held while a thread uses an engine; a thread may hold it more than once.

    Threads take turns step by step, and each step advances the requests of all of them. What callers set
    for their own tensors (autocast, a default device) does not apply inside.
    """

    def __init__(self) -> None:
        self._pid, self._num_forks = os.getpid(), _num_forks
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._left: ExitStack | None = None
        self._queue: deque[tuple[int, threading.Lock]] = deque()
        self.is_inside: str | None = None
        """What the owner is in the middle of, if nothing else can be done there."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a fork of the engine's: its threads and device are not available here."""
        return self._num_forks != _num_forks

    def check_process(self) -> None:
        """Raises RequestError in a forked child."""
        if self.is_elsewhere:
            raise RequestError(
                f"this engine belongs to process {self._pid}, and a forked child cannot use it: make an "
                "engine in the child, or start children with the method 'spawn'"
            )

    def __enter__(self) -> None:
        if self._num_forks != _num_forks:
            self.check_process()
        me = threading.get_ident()
        if self._owner == me:
            if self.is_inside is not None:
                raise RequestError(f"an engine cannot be called from inside {self.is_inside}")
            self._depth += 1
            return
        self._take(me)
        self._left = left()

    def _take(self, me: int) -> None:
        with self._mutex:
            if self._owner is None:
                self._owner, self._depth = me, 1
                return
            woken = threading.Lock()
            woken.acquire()
            self._queue.append((me, woken))
        try:
            woken.acquire()
        except BaseException:
            self._leave_queue(me, woken)
            raise

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            if self._left is not None:
                surroundings, self._left = self._left, None
                surroundings.close()
            with self._mutex:
                self._hand_over()

    def _hand_over(self) -> None:
        if self._queue:
            self._owner, woken = self._queue.popleft()
            self._depth = 1
            woken.release()
        else:
            self._owner = None

    def _leave_queue(self, me: int, woken: threading.Lock) -> None:
        with self._mutex:
            if (me, woken) in self._queue:
                self._queue.remove((me, woken))
            else:  # it has been given the turn meanwhile
                self._hand_over()
