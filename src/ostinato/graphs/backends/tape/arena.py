"""The memory that the tapes of a pool share, and the placement of one tape's intermediates in it.

Every tape starts at offset 0 of a slab, so a replay overwrites what other tapes left there: the same
hazard as in a shared CUDA graph pool, on purpose. Slabs never move and never shrink.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...memory import Allocate, tensor_over
from .storages import StorageRecord, TensorSpec

ALIGNMENT = 64


class _FreeList:
    """Free blocks (start, end) below a growing top, ascending: best fit, neighbours joined."""

    def __init__(self) -> None:
        self.top = 0
        self._blocks: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        fitting = [(end - start, start) for start, end in self._blocks if end - start >= size]
        if fitting:
            free, start = min(fitting)
            at = bisect_left(self._blocks, (start,))
            self._blocks[at : at + 1] = [(start + size, start + free)] if free > size else []
            return start
        # A last block that touches the top grows, instead of leaving a hole.
        touching = bool(self._blocks) and self._blocks[-1][1] == self.top
        start = self._blocks.pop()[0] if touching else self.top
        self.top = start + size
        return start

    def give(self, start: int, size: int) -> None:
        end = start + size
        at = upto = bisect_left(self._blocks, (start,))
        if at and self._blocks[at - 1][1] == start:
            at -= 1
            start = self._blocks[at][0]
        if upto < len(self._blocks) and self._blocks[upto][0] == end:
            end = self._blocks[upto][1]
            upto += 1
        self._blocks[at:upto] = [(start, end)]


def place(records: Sequence[StorageRecord]) -> tuple[list[int], int]:
    """An offset for each storage, and the total size. Storages that share a call never overlap."""
    free = _FreeList()
    offsets = [0] * len(records)
    ending: list[tuple[int, int]] = []
    for index in sorted(range(len(records)), key=lambda i: (records[i].first, -records[i].nbytes)):
        record = records[index]
        while ending and ending[0][0] < record.first:
            done = heappop(ending)[1]
            free.give(offsets[done], _padded(records[done].nbytes))
        if record.nbytes:
            offsets[index] = free.take(_padded(record.nbytes))
            heappush(ending, (record.last, index))
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
        allocate = self._allocate
        slab = allocate(nbytes).untyped_storage() if allocate else torch.UntypedStorage(nbytes)
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


class Layout:
    """Where every storage of a finished tape lives: in the pool's memory if it may move."""

    def __init__(self, records: list[StorageRecord], memory: TapeMemory) -> None:
        moving = [record for record in records if record.held is None]
        offsets, total = place(moving)
        slab = memory.slab(total) if total else torch.UntypedStorage(0)
        offset = iter(offsets)
        self._base = [(slab, next(offset)) if r.held is None else (r.held, 0) for r in records]

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """A new tensor at the place of a recorded one."""
        storage, base = self._base[spec.storage]
        offset = spec.offset + base // spec.dtype.itemsize
        result = tensor_over(storage, spec.dtype, spec.size, spec.stride, offset)
        if spec.conj:
            torch._C._set_conj(result, True)
        if spec.neg:
            torch._C._set_neg(result, True)
        return result
