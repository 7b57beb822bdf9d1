"""Calls into an event loop from another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: Any) -> bool:
    """Have a loop call this; False if it is closed, as after `asyncio.run`: nobody waits in it any more."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


def settle(future: asyncio.Future[Any], result: Any) -> None:
    """Set a future's result or exception; it may have been cancelled."""
    if future.cancelled():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
