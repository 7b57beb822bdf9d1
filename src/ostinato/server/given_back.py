"""Memory that large requests took goes back to the system, where the C library would keep it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from functools import cache

SETTLING_SECONDS = 1.0
LONGEST_SECONDS = 5.0


class GivenBack:
    """Gives back what is free, a second after it was last asked to, and under steady demand every few.

    An exception and the frames it went through refer to each other, and the frames to the text that was
    refused: garbage is collected first.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._latest = 0.0

    def soon(self) -> None:
        """Something large is done."""
        loop = asyncio.get_running_loop()
        if self._timer is None:
            self._latest = loop.time() + LONGEST_SECONDS
        else:
            self._timer.cancel()
        at = min(loop.time() + SETTLING_SECONDS, self._latest)
        self._timer = loop.call_at(at, self._now)

    def _now(self) -> None:
        self._timer = None
        _give_back()


def _give_back() -> None:
    gc.collect()
    _trim()()


@cache
def _trim() -> Callable[[], object]:
    """glibc's `malloc_trim`; nothing where there is another library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: None) if trim is None else (lambda: trim(0))
