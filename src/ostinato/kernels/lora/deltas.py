"""What adapters add, on its way into a kernel that multiplies, gates and adds by itself."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .adapters import Adapted

Deltas = tuple[Tensor, Tensor]
"""float32 [T, out], undefined for tokens without an adapter, and the slots of all tokens."""


class Operands(NamedTuple):
    """The adapters of a linear layer as an op takes them, field by field: torch dispatches calls that have
    anything but tensors and numbers among their arguments."""

    a: Tensor
    b: Tensor
    ranks: Tensor
    slots: Tensor
    order: Tensor
    blocks: Tensor
    second: int
    """First row of the second part, or `out`."""
    third: int

    @classmethod
    def of(cls, adapted: Adapted) -> Operands:
        """Of rows in blocks."""
        stack, rows = adapted
        assert rows.order is not None
        assert rows.blocks is not None
        matrices = stack.a, stack.b, stack.ranks
        return cls(*matrices, rows.slots, rows.order, rows.blocks, *stack.first_rows)

    def shrinker_of(self, x: Tensor) -> ModuleType:
        """The kernel for the first matrices and rows x [T, in]."""
        from . import cuda_shrink, triton_shrink

        return cuda_shrink if cuda_shrink.is_the_choice(x) else triton_shrink

    def shrunk(self, x: Tensor, norm_weight: Tensor | None = None) -> Shrunk:
        """Of rows x [T, in], times the weight of the norm before the layer: its factor is the product's."""
        room, grouped = self.b.size(2), (self.ranks, self.order, self.blocks)
        return Shrunk(self.shrinker_of(x).shrink(x, norm_weight, self.a, room, *grouped), self)

    def deltas(self, x: Tensor, norm_weight: Tensor | None = None) -> Deltas:
        """The same to the end."""
        from . import cuda_one_token

        if not cuda_one_token.is_the_choice(x):
            return self.shrunk(x, norm_weight).deltas()
        matrices, parts = (self.a, self.b, self.ranks), (self.second, self.third)
        return cuda_one_token.one_token(x, norm_weight, *matrices, self.slots, *parts), self.slots


class Shrunk(NamedTuple):
    """What the first matrices left of a layer's input, for the second."""

    sums: Tensor
    """float32 [splits, T, parts * room]; one split where `cuda_shrink` was the choice."""
    of: Operands

    def add_to(self, product: Tensor, *, plain: bool = False) -> None:
        """To dense rows [T, out], by a plain launch if asked."""
        self._expand(product, is_new=False, plain=plain)

    def put_to(self, new: Tensor, *, plain: bool = False) -> None:
        """In rows [T, out] that have nothing yet."""
        self._expand(new, is_new=True, plain=plain)

    def deltas(self) -> Deltas:
        """By themselves."""
        new = self.sums.new_empty(self.of.slots.size(0), self.of.b.size(1), dtype=torch.float32)
        self.put_to(new)
        return new, self.of.slots

    def _expand(self, product: Tensor, *, is_new: bool, plain: bool = False) -> None:
        from .triton_expand import expand

        parts, grouped = (self.of.second, self.of.third), (self.of.ranks, self.of.order, self.of.blocks)
        expand(self.sums, self.of.b, *parts, *grouped, product, is_new, plain)
