"""Turns of tenants at something that few can use at a time, such as a process that tokenises."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from .fair_queue import FairQueue
from .tenant import current_tenant


class FairTurns:
    """Places, given to those who wait by weighted fair shares of what they cost. Used from one event loop."""

    def __init__(self, places: int, most_waiting: int) -> None:
        """`most_waiting`: cost that may wait or be at work; a tenant below half of it may still wait."""
        self._free = places
        self._most_waiting = most_waiting
        self._queue = FairQueue[asyncio.Future[None]]()
        self._costs: Counter[str] = Counter()
        self._total = 0

    def has_room(self, cost: int) -> bool:
        """Whether so much more may wait."""
        if not self._total or self._total + cost <= self._most_waiting:
            return True
        own = self._costs[current_tenant.get().name] + cost
        return 2 * own <= self._most_waiting and self._total + cost <= 2 * self._most_waiting

    @asynccontextmanager
    async def turn(self, cost: int) -> AsyncIterator[None]:
        """Wait for a place, and have it inside."""
        tenant = current_tenant.get()
        name = tenant.name
        self._costs[name] += cost
        self._total += cost
        try:
            await self._wait(name, tenant.weight)
            self._queue.charge(name, cost, tenant.weight)
            try:
                yield
            finally:
                self._free += 1
                self._give()
        finally:
            self._total -= cost
            self._costs[name] -= cost
            if not self._costs[name]:
                del self._costs[name]

    async def _wait(self, name: str, weight: float) -> None:
        if self._free and not len(self._queue):
            self._free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._queue.add(name, place, weight)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was given in the same moment
                self._free += 1
                self._give()
            else:
                with suppress(KeyError):  # it may have been passed over already
                    self._queue.remove(name, place)
            raise

    def _give(self) -> None:
        while self._free and (place := self._queue.take()) is not None:
            if not place.cancelled():
                self._free -= 1
                place.set_result(None)
