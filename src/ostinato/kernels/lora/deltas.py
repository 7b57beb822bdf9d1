"""What adapters add, on its way into a kernel that multiplies, gates and adds by itself."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .adapters import Adapted

Deltas = tuple[Tensor, Tensor]
"""float32 [T, out], undefined for tokens without an adapter, and the slots of all tokens."""


def deltas_of(x: Tensor, adapted: Adapted, norm_weight: Tensor | None = None) -> Deltas:
    """Of rows x [T, in], times the weight of the norm before the layer: its factor is the product's."""
    from . import cuda_one_token

    stack, rows = adapted
    if not cuda_one_token.is_the_choice(x):
        return Shrunk.of(x, adapted, norm_weight).deltas()
    matrices = stack.a, stack.b, stack.ranks
    return cuda_one_token.one_token(x, norm_weight, *matrices, rows.slots, *stack.first_rows), rows.slots


def shrinker_of(x: Tensor) -> ModuleType:
    """The kernel for the first matrices of adapters of rows x."""
    from . import cuda_shrink, triton_shrink

    return cuda_shrink if cuda_shrink.is_the_choice(x) else triton_shrink


class Shrunk(NamedTuple):
    """What was left of a layer's input by the first matrices, and what the second are to make of it.

    Ops take it field by field: a call with a list among its arguments would be dispatched by torch.
    """

    sums: Tensor
    """float32 [splits, T, parts * room]; one split where `cuda_shrink` was the choice."""
    b: Tensor
    ranks: Tensor
    slots: Tensor
    order: Tensor
    blocks: Tensor
    second: int
    """First row of the second part, or `out`."""
    third: int

    @classmethod
    def of(cls, x: Tensor, adapted: Adapted, norm_weight: Tensor | None = None) -> Shrunk:
        """As `deltas_of`."""
        stack, rows = adapted
        assert rows.order is not None
        assert rows.blocks is not None
        sums = shrinker_of(x).shrink(
            x, norm_weight, stack.a, stack.room, stack.ranks, rows.order, rows.blocks
        )
        return cls(sums, stack.b, stack.ranks, rows.slots, rows.order, rows.blocks, *stack.first_rows)

    def add_to(self, product: Tensor, *, plain: bool = False) -> None:
        """To dense rows [T, out], by a plain launch if asked."""
        self._expand(product, is_new=False, plain=plain)

    def deltas(self) -> Deltas:
        """By themselves."""
        new = self.sums.new_empty(self.slots.size(0), self.b.size(1), dtype=torch.float32)
        self._expand(new, is_new=True)
        return new, self.slots

    def _expand(self, product: Tensor, *, is_new: bool, plain: bool = False) -> None:
        from .triton_expand import expand

        grouped = self.ranks, self.order, self.blocks
        expand(self.sums, self.b, self.second, self.third, *grouped, product, is_new, plain)
