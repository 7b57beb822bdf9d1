"""Large bodies take turns: reading one holds the event loop, and others have streams to be fed."""

from __future__ import annotations

import asyncio
import time

from ..given_back import GivenBack

LARGE = 128 * 1024
"""Bytes from which on a body is one of these."""
PAUSE = 2.0
"""Times the CPU time that a body took, before the next one has its turn."""
HELD_BODIES = 16
"""How many of the largest size may be arriving at once."""


class LargeBodies:
    """What large bodies share. Used from one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self.held = 0
        """Bytes of bodies on their way to whoever reads them."""
        self.checking = asyncio.Lock()
        """One at a time is looked through."""
        self._most = max(HELD_BODIES * max_bytes, 2 * LARGE)
        self._turns = asyncio.Lock()
        self._next = 0.0
        self._given_back = GivenBack()

    @property
    def is_full(self) -> bool:
        """Whether there is no room for more."""
        return self.held > self._most

    def hold(self) -> Held:
        """The count of a body that begins to arrive."""
        return Held(self)

    async def turn(self) -> None:
        """Wait; what the caller does next, without waiting for anything, is what the turn is for."""
        async with self._turns:
            await asyncio.sleep(max(0.0, self._next - time.monotonic()))
            # It runs when the caller has done, and before the next one is woken.
            asyncio.get_running_loop().call_soon(self._end_turn, time.thread_time())

    def _end_turn(self, began: float) -> None:
        self._given_back.soon()
        self._next = time.monotonic() + PAUSE * (time.thread_time() - began)


class Held:
    """One body's part of what is held."""

    def __init__(self, all: LargeBodies) -> None:
        self.all = all
        self.bytes = 0

    def take(self, count: int) -> None:
        """More of it has come."""
        self.bytes += count
        self.all.held += count

    def release(self) -> None:
        """It is read, or given up; may be called again."""
        self.all.held -= self.bytes
        self.bytes = 0
