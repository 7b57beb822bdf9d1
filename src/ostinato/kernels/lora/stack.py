"""The adapters of one linear layer, all slots in one tensor: graphs keep its address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..allocation import Allocate, allocated
from ..host_sizes import cdiv

MOST_PARTS = 3
"""Query, key and value."""
RANKS_TOGETHER = 16
"""Kernels take so many at a time; a slot has room for a multiple of it."""


class StackError(ValueError):
    """Matrices that do not fit a slot; nothing was changed."""


class LowRank(NamedTuple):
    """What an adapter adds to one part of a layer: `scaling * b @ (a @ x)`."""

    a: Tensor
    """[rank, in]."""
    b: Tensor
    """[rows of the part, rank]."""
    scaling: float = 1.0


@dataclass(frozen=True, eq=False)
class Stack:
    """Of a linear layer [out, in] that may have several parts, one below the other (`Linear.parts`).

        a [slots, parts * room, in]     block p is of part p
        b [slots, out, room]            rows of part p are for block p; scaling is folded in

    `room` is the highest rank, rounded up. Behind the rank of an adapter there are zeros.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    """int32 [slots]: behind so many all is zero, in every part; 0: the slot adds nothing to this layer."""
    parts: tuple[int, ...]
    """Rows of each."""

    @classmethod
    def empty(
        cls,
        num_slots: int,
        max_rank: int,
        in_features: int,
        parts: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Allocate | None = None,
        name: str = "",
    ) -> Stack:
        """Slots that add nothing. `allocate` gives memory by name: `<name>.lora_a` and so on."""
        assert 1 <= len(parts) <= MOST_PARTS, parts
        room = cdiv(max_rank, RANKS_TOGETHER) * RANKS_TOGETHER
        give = partial(allocated, allocate) if allocate else _by_torch
        stack = cls(
            give((num_slots, len(parts) * room, in_features), dtype, device, f"{name}.lora_a"),
            give((num_slots, sum(parts), room), dtype, device, f"{name}.lora_b"),
            give((num_slots,), torch.int32, device, f"{name}.lora_ranks"),
            tuple(parts),
        )
        for tensor in (stack.a, stack.b, stack.ranks):
            tensor.zero_()
        return stack

    @property
    def num_slots(self) -> int:
        """Adapters that are resident at a time."""
        return self.a.size(0)

    @property
    def room(self) -> int:
        """Ranks of a slot."""
        return self.b.size(2)

    @property
    def first_rows(self) -> tuple[int, int]:
        """Returns the first rows of the second and the third part; where there is none, the rows of all."""
        second = self.parts[0]
        return second, second + (self.parts[1] if len(self.parts) > 1 else 0)

    @property
    def nbytes(self) -> int:
        """Returns the size of all slots."""
        return self.a.nbytes + self.b.nbytes + self.ranks.nbytes

    def put(self, slot: int, parts: Sequence[LowRank | None]) -> None:
        """Make `slot` this adapter; None for a part that it leaves alone.

        No step that is under way may use the slot. Copies are queued on the current stream.
        """
        self._check(slot, parts)
        self.clear(slot)
        first = 0
        for number, (part, rows) in enumerate(zip(parts, self.parts, strict=True)):
            if part is not None:
                rank = part.a.size(0)
                block = self.a[slot, number * self.room : number * self.room + rank]
                block.copy_(part.a, non_blocking=True)
                scaled = (part.b.float() * part.scaling).to(self.b.dtype)
                self.b[slot, first : first + rows, :rank].copy_(scaled, non_blocking=True)
            first += rows
        self.ranks[slot].fill_(max((part.a.size(0) for part in parts if part is not None), default=0))

    def clear(self, slot: int) -> None:
        """Let `slot` add nothing."""
        for tensor in (self.a, self.b, self.ranks):
            tensor[slot].zero_()

    def _check(self, slot: int, parts: Sequence[LowRank | None]) -> None:
        if not 0 <= slot < self.num_slots:
            raise StackError(f"slot {slot} of {self.num_slots}")
        if len(parts) != len(self.parts):
            raise StackError(f"matrices of {len(parts)} parts for a layer of {len(self.parts)}")
        for number, (part, rows) in enumerate(zip(parts, self.parts, strict=True)):
            if part is None:
                continue
            rank = part.a.size(0)
            if rank > self.room:
                raise StackError(f"rank {rank}, where there is room for {self.room}")
            wanted = (rank, self.a.size(2)), (rows, rank)
            if (tuple(part.a.shape), tuple(part.b.shape)) != wanted:
                raise StackError(
                    f"part {number}: matrices {list(part.a.shape)} and {list(part.b.shape)} where "
                    f"{list(wanted[0])} and {list(wanted[1])} belong"
                )


def _by_torch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)
