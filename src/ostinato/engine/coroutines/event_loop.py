"""What another thread has an event loop do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> bool:
    """Have a loop call this; False if it is closed, as `asyncio.run` leaves it: nobody waits in it."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


def settle(future: asyncio.Future[Any], result: Any) -> None:
    """Let this come of it, an exception or a value; nobody may be waiting any more."""
    if future.cancelled():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
