"""A queue that serves tenants by weighted fair shares of what they cost.

Note [Virtual service]
Each tenant has a counter: what it was charged, over its weight. The next to be served is the tenant with
the lowest counter, and of one tenant the first in the queue. A tenant that had nothing in the queue begins
with at least the lowest counter of those that wait: having asked for nothing earns nothing. Costs can be
charged at any time, so nobody has to know beforehand how long an answer will be.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

MOST_REMEMBERED = 4096
"""Tenants whose counters are kept though they have nothing in the queue; about as many."""
_MOST_PASSED = 64
"""Tenants that are asked in turn whether they may be served."""


class _Line(Generic[Item]):
    """One tenant's items and counter."""

    def __init__(self, service: float, weight: float) -> None:
        self.items: OrderedDict[Item, None] = OrderedDict()
        self.service = service
        self.weight = weight
        self.is_in_heap = False


class FairQueue(Generic[Item]):
    """Items of tenants; each item is in it at most once. See Note [Virtual service]."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, _Line[Item]] = OrderedDict()
        self._heap: list[tuple[float, int, str]] = []
        """Tenants with items; a counter may have grown since its entry was made."""
        self._num_pushed = 0
        self._num_items = 0
        self._forget_at = MOST_REMEMBERED
        self._last = ""
        self._floor = 0.0

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[Item]:
        for line in self._lines.values():
            yield from line.items

    def add(self, tenant: str, item: Item, weight: float = 1.0, *, is_served: bool = False) -> None:
        """Queue an item behind the others of its tenant. `is_served`: earlier ones have left the queue and
        are not done, so the tenant was never away."""
        line = self._line(tenant, weight)
        if not line.items and not is_served:
            line.service = max(line.service, self._lowest())
        line.items[item] = None
        self._num_items += 1
        if not line.is_in_heap:
            self._push(tenant, line)

    def charge(self, tenant: str, cost: float, weight: float = 1.0) -> None:
        """Count a cost of this tenant, whether or not it has anything in the queue."""
        line = self._line(tenant, weight)
        line.service += cost / line.weight

    def next(self, may: Callable[[str], bool] | None = None) -> str | None:
        """Returns the tenant whose turn it is, of those that `may` be served; None: there is none."""
        passed: list[tuple[float, int, str]] = []
        found = None
        while self._heap and len(passed) < _MOST_PASSED:
            service, _, tenant = self._heap[0]
            line = self._lines[tenant]
            if not line.items:
                heapq.heappop(self._heap)
                line.is_in_heap = False
            elif service < line.service:
                heapq.heapreplace(self._heap, self._entry(tenant, line))
            elif may is None or may(tenant):
                found = tenant
                break
            else:
                passed.append(heapq.heappop(self._heap))
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def first_of(self, tenant: str) -> Item:
        """Returns the first item of a tenant that has some."""
        return next(iter(self._lines[tenant].items))

    def remove(self, tenant: str, item: Item) -> None:
        """Take an item out: its turn has come, or nobody wants it any more."""
        line = self._lines[tenant]
        del line.items[item]
        self._num_items -= 1
        self._last = tenant

    def take(self) -> Item | None:
        """Take out the item whose turn it is; None: the queue is empty."""
        tenant = self.next()
        if tenant is None:
            return None
        item = self.first_of(tenant)
        self.remove(tenant, item)
        return item

    def _line(self, tenant: str, weight: float) -> _Line[Item]:
        line = self._lines.get(tenant)
        if line is None:
            if len(self._lines) >= self._forget_at:
                self._forget()
            line = self._lines[tenant] = _Line(self._lowest(), weight)
        line.weight = weight
        return line

    def _lowest(self) -> float:
        """The lowest counter of those that wait, or that of the last one that did."""
        first = self.next()
        of = self._lines.get(self._last if first is None else first)
        if of is not None:
            self._floor = max(self._floor, of.service)
        return self._floor

    def _push(self, tenant: str, line: _Line[Item]) -> None:
        line.is_in_heap = True
        heapq.heappush(self._heap, self._entry(tenant, line))

    def _entry(self, tenant: str, line: _Line[Item]) -> tuple[float, int, str]:
        self._num_pushed += 1
        return line.service, self._num_pushed, tenant

    def _forget(self) -> None:
        """Forget half of the tenants without items, those known longest first."""
        idle = [tenant for tenant, line in self._lines.items() if not line.is_in_heap]
        for tenant in idle[: max(1, len(idle) // 2)]:
            del self._lines[tenant]
        self._forget_at = max(MOST_REMEMBERED, 2 * len(self._lines))
