"""Waiting for a trainer with a time limit, in calls that have none of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import TransferError, TransferTimeout

_Found = TypeVar("_Found")
_LOOK_SECONDS = 0.05


class Patience:
    """A time limit for waiting, for one wait at a time; the wait can be given up from another thread."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._is_given_up = threading.Event()

    def within(self, what: str, function: Callable[[], _Found]) -> _Found:
        """The result of `function`, run in a thread. Raises TransferTimeout if it takes longer than the
        limit, TransferError after `give_up`; the thread then runs on and its result is ignored."""
        self._is_given_up.clear()
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.extend((function(), None))
            except Exception as error:
                outcome.extend((None, error))

        thread = threading.Thread(target=run, name="ostinato-transfer", daemon=True)
        thread.start()
        end = time.monotonic() + self.seconds
        while thread.is_alive():
            if self._is_given_up.is_set():
                raise TransferError(f"{what} was abandoned in favour of a later call")
            if time.monotonic() >= end:
                raise TransferTimeout(f"{what} took longer than {self.seconds:g} s")
            thread.join(min(_LOOK_SECONDS, max(0.0, end - time.monotonic())))
        found, error = outcome
        if error is not None:
            raise error
        result: _Found = found
        return result

    def until(self, what: str, look: Callable[[float], bool]) -> None:
        """Call `look`, which waits that many seconds, until it returns True. Raises as `within` does."""
        self._is_given_up.clear()
        end = time.monotonic() + self.seconds
        while not look(_LOOK_SECONDS):
            if self._is_given_up.is_set():
                raise TransferError(f"{what} was abandoned in favour of a later call")
            if time.monotonic() >= end:
                raise TransferTimeout(f"{what} took longer than {self.seconds:g} s")

    def give_up(self) -> None:
        """Stop the current wait."""
        self._is_given_up.set()
