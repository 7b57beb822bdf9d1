"""Where on the device the memory of certain pools of torch's caching allocator is."""

from bisect import bisect_right
from typing import Any

import torch


class PoolSegments:
    """The segments of pools that are never released; read anew only when some segment may have changed.

    Reading them takes a millisecond and is wanted twice for every captured graph. A segment of whatever pool
    comes, grows, shrinks or goes only when the allocator takes bytes from the device or gives them back. It
    counts both, and counts go back only when somebody resets torch's statistics: while they stand still, and
    with them the bytes that it has, what was read is right.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools: set[Any] = set()
        self._counts: tuple[int, ...] | None = None
        self._ranges: list[tuple[int, int]] = []

    def add(self, pool: Any) -> None:
        """Count the segments of one more pool, by the handle that torch gave it."""
        self._pools.add(tuple(pool))
        self._counts = None

    @property
    def bytes(self) -> int:
        """Bytes of all segments."""
        self._update()
        return sum(end - start for start, end in self._ranges)

    def contains(self, address: int) -> bool:
        """Whether an address lies in one of them. None ever goes, so a known one needs no second look."""
        if not self._is_known(address):
            self._update()
        return self._is_known(address)

    def _is_known(self, address: int) -> bool:
        place = bisect_right(self._ranges, (address, 1 << 63)) - 1
        return place >= 0 and address < self._ranges[place][1]

    def _update(self) -> None:
        reserved = torch.cuda.memory_stats_as_nested_dict(self._device)["reserved_bytes"]["all"]
        counts = reserved["allocated"], reserved["freed"], reserved["current"]
        if counts == self._counts:
            return
        # Without an argument: torch 2.11's snapshot of one pool releases the two numbers of the pool's id
        # once too often, which corrupts Python's heap as soon as they are no longer small.
        found = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) in self._pools]
        self._ranges = sorted((s["address"], s["address"] + s["total_size"]) for s in found)
        self._counts = counts
