"""Memory that large requests took goes back to the system, where the C library would keep it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from functools import cache

SETTLING_SECONDS = 1.0


class GivenBack:
    """Gives back what is free, a second after it was last asked to.

    An exception and the frames it went through refer to each other, and the frames to the text that was
    refused: garbage is collected first.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """Something large is done."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(SETTLING_SECONDS, _give_back)


def _give_back() -> None:
    gc.collect()
    _trim()()


@cache
def _trim() -> Callable[[], object]:
    """glibc's `malloc_trim`; nothing where there is another library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: None) if trim is None else (lambda: trim(0))
