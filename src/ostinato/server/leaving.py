"""The last resort of a server that is to leave: a thread that ends the process when its time is over."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from .log_lines import announce

EXIT_CODE = 1


class LastResort:
    """Whatever the event loop waits for, or stands still over, the process does not outlive its time."""

    def __init__(self, before: Callable[[], None]) -> None:
        """`before` is called from the thread, to end what must not stay behind."""
        self._before = before
        self._end = 0.0
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def within(self, seconds: float) -> None:
        """Have the process ended by then; an earlier end stays as it is."""
        end = time.monotonic() + seconds
        if self._thread is None:
            self._end = end
            self._thread = threading.Thread(target=self._wait, name="ostinato-last-resort", daemon=True)
            self._thread.start()
        elif end < self._end:
            self._end = end
            self._changed.set()

    def _wait(self) -> None:
        while (left := self._end - time.monotonic()) > 0:
            self._changed.wait(left)
            self._changed.clear()
        announce("something would not end in time; leaving without it")
        self._before()
        os._exit(EXIT_CODE)
