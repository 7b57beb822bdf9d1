"""Which memory a recorded call touches: storages by identity, tensors as geometry over a storage.

Recording must not keep intermediates alive, or its peak memory would exceed the eager step's. So recorded
calls hold `TensorSpec`s, and a storage is known by its address in C++ while a weak reference to it keeps
that address from being reused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...blame import calling_line
from ...errors import CaptureError


class TensorSpec(NamedTuple):
    """A tensor without its memory: geometry over the storage of a given number."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool


@dataclass(slots=True)
class StorageRecord:
    """What the recording knows of one storage."""

    ref: StorageWeakRef
    nbytes: int
    inside: bool
    """First seen as the fresh result of a recorded call; everything else is outside and never moves."""
    first: int
    last: int
    held: torch.UntypedStorage | None = None
    """Set for memory that stays where it is: outside, kept strongly, or found alive at the end."""
    kept: bool = False
    written: bool = False
    """A recorded call writes to it in place."""


_NO_LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
"""Most arguments are of these, and hold nothing."""


def map_leaves(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The same arguments with every leaf of one kind changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list):
        return [item if type(item) in _NO_LEAVES else map_leaves(item, kind, change) for item in value]
    if isinstance(value, dict):
        return {key: map_leaves(item, kind, change) for key, item in value.items()}
    if type(value) is tuple:
        return tuple([item if type(item) in _NO_LEAVES else map_leaves(item, kind, change) for item in value])
    return value


class StorageTable:
    """Every storage a recording has met, numbered in order of appearance."""

    def __init__(self) -> None:
        self.records: list[StorageRecord] = []
        self._numbers: dict[int, int] = {}

    def known(self, tensor: torch.Tensor) -> StorageRecord | None:
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        return None if number is None else self.records[number]

    def is_known(self, tensor: torch.Tensor) -> bool:
        return self.known(tensor) is not None

    def is_inside(self, tensor: torch.Tensor) -> bool:
        record = self.known(tensor)
        return record is not None and record.inside

    def spec(self, tensor: torch.Tensor, position: int, *, fresh: bool = False) -> TensorSpec:
        """Describe a tensor; a storage not met before is registered as inside if `fresh`, else outside."""
        if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
            raise CaptureError(
                f"the tape records strided CPU tensors only, not {tensor.layout} on {tensor.device}: "
                "keep such tensors out of the captured step",
                where=calling_line(),
            )
        storage = tensor.untyped_storage()
        identity = storage._cdata
        number = self._numbers.get(identity)
        if number is None:
            number = self._numbers[identity] = len(self.records)
            held = None if fresh else storage
            record = StorageRecord(StorageWeakRef(storage), storage.nbytes(), fresh, position, position, held)
            self.records.append(record)
        else:
            record, nbytes = self.records[number], storage.nbytes()
            if nbytes > record.nbytes:  # resize_ has grown it
                record.nbytes = nbytes
        return TensorSpec(
            number,
            tensor.dtype,
            tuple(tensor.size()),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def use(self, spec: TensorSpec, position: int) -> TensorSpec:
        """Note that the call at `position` needs the memory."""
        record = self.records[spec.storage]
        record.last = max(record.last, position)
        return spec

    def hold_survivors(self) -> None:
        """Keep in place every inside storage that somebody outside the recording still refers to.

        Kept for replay or not: on CUDA, too, memory that somebody holds is not given to another graph. Call
        it only when nothing of ours, nor the caller's output, holds a tensor of the step any more.
        """
        for record in self.records:
            if record.inside and record.held is None:
                record.held = torch.UntypedStorage._new_with_weak_ptr(record.ref.cdata)
