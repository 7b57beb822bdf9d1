"""Where every storage of a finished tape lives, and tensors over those places."""

import torch

from ...memory import tensor_over
from .arena import Interval, TapeMemory, place
from .storages import StorageRecord, TensorSpec


class Layout:
    """Places inside storages that may move in the pool's memory; all others stay where they are."""

    def __init__(self, records: list[StorageRecord], memory: TapeMemory) -> None:
        moving = [number for number, record in enumerate(records) if record.held is None]
        intervals = [Interval(records[n].first, records[n].last, records[n].nbytes) for n in moving]
        offsets, total = place(intervals)
        slab = memory.slab(total) if total else torch.UntypedStorage(0)
        self._base: list[tuple[torch.UntypedStorage, int]] = [
            (slab if record.held is None else record.held, 0) for record in records
        ]
        for number, offset in zip(moving, offsets, strict=True):
            self._base[number] = (slab, offset)

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
