"""The memory that the tapes of a pool share, and the placement of one tape's intermediates in it.

Every tape starts at offset 0 of a slab, so a replay overwrites what other tapes left there: the same
hazard as in a shared CUDA graph pool, on purpose. Slabs never move and never shrink.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...memory import Allocate

ALIGNMENT = 64


class Interval(NamedTuple):
    """Memory needed from the call `first` to the call `last`, both included."""

    first: int
    last: int
    nbytes: int


class _FreeList:
    """Free blocks below a growing top: best fit, neighbours joined."""

    def __init__(self) -> None:
        self.top = 0
        self._by_size: list[tuple[int, int]] = []
        self._size_at: dict[int, int] = {}
        self._start_of: dict[int, int] = {}

    def take(self, size: int) -> int:
        found = bisect_left(self._by_size, (size, 0))
        if found < len(self._by_size):
            free, start = self._by_size[found]
            self._remove(start, free)
            if free > size:
                self._insert(start + size, free - size)
            return start
        start = self._start_of.get(self.top, self.top)
        if start < self.top:  # the last free block touches the top: grow it instead of leaving a hole
            self._remove(start, self.top - start)
        self.top = start + size
        return start

    def give(self, start: int, size: int) -> None:
        end = start + size
        if end in self._size_at:
            after = self._size_at[end]
            self._remove(end, after)
            end += after
        if start in self._start_of:
            before = self._start_of[start]
            self._remove(before, start - before)
            start = before
        self._insert(start, end - start)

    def _insert(self, start: int, size: int) -> None:
        insort(self._by_size, (size, start))
        self._size_at[start] = size
        self._start_of[start + size] = start

    def _remove(self, start: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, start))]
        del self._size_at[start]
        del self._start_of[start + size]


def place(intervals: Sequence[Interval]) -> tuple[list[int], int]:
    """An offset for each interval, and the total size. Intervals that share a call never overlap."""
    free = _FreeList()
    offsets = [0] * len(intervals)
    ending: list[tuple[int, int]] = []
    order = sorted(range(len(intervals)), key=lambda i: (intervals[i].first, -intervals[i].nbytes))
    for index in order:
        interval = intervals[index]
        while ending and ending[0][0] < interval.first:
            done = heappop(ending)[1]
            free.give(offsets[done], _padded(intervals[done].nbytes))
        if interval.nbytes:
            offsets[index] = free.take(_padded(interval.nbytes))
            heappush(ending, (interval.last, index))
    return offsets, free.top


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class TapeMemory:
    """The slabs of a pool, and a count of what its tapes hold besides."""

    def __init__(self, allocate: Allocate | None = None) -> None:
        self._allocate = allocate
        self._slabs: list[torch.UntypedStorage] = []
        self._held: dict[int, StorageWeakRef] = {}

    def slab(self, nbytes: int) -> torch.UntypedStorage:
        """A slab with room for one tape: an existing one if any is large enough."""
        for slab in self._slabs:
            if slab.nbytes() >= nbytes:
                return slab
        slab = (
            torch.UntypedStorage(nbytes)
            if self._allocate is None
            else self._allocate(nbytes).untyped_storage()
        )
        assert slab.data_ptr() % ALIGNMENT == 0
        # All ones is NaN in every floating type: what was never replayed cannot pass for a result.
        torch.empty(0, dtype=torch.uint8, device="cpu").set_(slab).fill_(0xFF)
        self._slabs.append(slab)
        return slab

    def count_held(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Count memory that a tape holds in storages of its own, for as long as it is alive."""
        for storage in storages:
            self._held[storage._cdata] = StorageWeakRef(storage)

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._all())

    def contains(self, address: int) -> bool:
        return any(s.data_ptr() <= address < s.data_ptr() + s.nbytes() for s in self._all())

    def _all(self) -> Iterator[torch.UntypedStorage]:
        yield from self._slabs
        for key, ref in list(self._held.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is not None:
                yield storage
            else:
                del self._held[key]
