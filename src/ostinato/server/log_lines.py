"""What a server says while it serves, on standard error, a line each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

MOST_PER_SECOND = 20
"""Lines of one kind; clients that are refused a thousand times a second shall not fill a disk."""


def say(text: str) -> None:
    """A line with the time of day."""
    announce(f"{time.strftime('%H:%M:%S')} {text}")


def announce(text: str) -> None:
    """A line about the server itself."""
    print(f"ostinato: {text}", file=sys.stderr, flush=True)


class LimitedLines:
    """Says at most so many lines a second, and how many it left out."""

    def __init__(self, what: str) -> None:
        """`what` is left out, in the plural."""
        self._what = what
        self._second = 0
        self._said = 0
        self._left_out = 0

    def say(self, text: str | Callable[[], str]) -> None:
        """A line, or what makes it, unless there were too many in this second."""
        now = int(time.monotonic())
        if now != self._second:
            if self._left_out:
                say(f"{self._left_out} more {self._what}")
            self._second, self._said, self._left_out = now, 0, 0
        if self._said < MOST_PER_SECOND:
            self._said += 1
            say(text if isinstance(text, str) else text())
        else:
            self._left_out += 1
