"""Adds `b @ (a @ x)` of each token's adapter to a linear layer's product: dispatch and reference.

    x [T, in]  --a, "shrink"-->  [T, parts * room], float32 split-K partials  --b, "expand"-->  [T, out]

Kernels that multiply take the partials as `Shrunk` and expand them in their epilogue; the GEMVs, for one
token, take the whole of it as `Deltas`; other products are added to when they are there.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .adapter_rows import Adapted, Rows, ToShrink
from .stack import Stack

_MOST_GATHERED_BYTES = 64 << 20
"""Of copies of adapters' matrices, one for each token; with more, every slot takes all tokens."""

Deltas = tuple[Tensor, Tensor]
"""float32 [T, out], undefined for tokens without an adapter, and the slots of all tokens."""


def add(x: Tensor, product: Tensor, stack: Stack, rows: Rows) -> None:
    """Computes `product[t] += b[slot] @ (a[slot] @ x[t])` with the slot of token t, part by part, in place.

    x [T, in]; `product` dense [T, out] in the dtype of x or float32. Rows of tokens without an adapter keep
    their bits, and what a token gets depends on no other token.
    """
    if rows.blocks is None:
        _add_in_torch(x, product, stack, rows)
    else:
        Operands.of(Adapted(stack, rows)).shrunk(x).add_to(product)


def _add_in_torch(x: Tensor, product: Tensor, stack: Stack, rows: Rows) -> None:
    """Adds as `add` does, in shapes that do not depend on which adapters a step has: the reference."""
    copied = x.size(0) * (stack.a.nbytes + stack.b.nbytes) // stack.num_slots
    if x.size(0) <= 4 * stack.num_slots and copied <= _MOST_GATHERED_BYTES:
        delta = _gathered(x, stack, rows.slots.clamp(min=0).long())
        is_changed = rows.slots.ge(0).unsqueeze(1)
        product.copy_(torch.where(is_changed, product + delta, product))
        return
    for slot in range(stack.num_slots):
        delta = _delta(x, stack.a[slot], stack.b[slot], stack)
        # Not by a factor of 0 or 1: 0 times what an adapter made infinite would reach everybody.
        product.copy_(torch.where(rows.slots.eq(slot).unsqueeze(1), product + delta, product))


def _gathered(x: Tensor, stack: Stack, slots: Tensor) -> Tensor:
    a, b = stack.a.index_select(0, slots), stack.b.index_select(0, slots)
    return _delta(x.unsqueeze(1), a, b, stack).squeeze(1)


def _delta(x: Tensor, a: Tensor, b: Tensor, stack: Stack) -> Tensor:
    """Multiplies x [..., T, in] with a [..., parts * room, in] and b [..., out, room]."""
    shrunk = x @ a.transpose(-1, -2)
    expanded = [
        inner @ matrix.transpose(-1, -2)
        for inner, matrix in zip(shrunk.split(stack.room, -1), b.split(list(stack.parts), -2), strict=True)
    ]
    return torch.cat(expanded, dim=-1)


class Operands(NamedTuple):
    """The adapters of a linear layer as custom ops and kernels take them."""

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
        """Takes them from a stack and from rows that are grouped in blocks."""
        stack, rows = adapted
        assert rows.order is not None
        assert rows.blocks is not None
        matrices = stack.a, stack.b, stack.ranks
        return cls(*matrices, rows.slots, rows.order, rows.blocks, *stack.first_rows)

    def _shrinker(self, x: Tensor) -> ModuleType:
        """Returns the kernel for `a` and rows x [T, in]."""
        from . import cuda_shrink, triton_shrink

        return cuda_shrink if cuda_shrink.is_the_choice(x) else triton_shrink

    def shrunk(self, x: Tensor, norm_weight: Tensor | None = None) -> Shrunk:
        """Multiplies rows x [T, in], times the weight of the norm before the layer, with `a`; the norm's
        factor is applied to the product."""
        return Shrunk(self._shrinker(x).shrink(self._to_shrink(x, norm_weight)), self)

    def _to_shrink(self, x: Tensor, norm_weight: Tensor | None) -> ToShrink:
        return ToShrink(x, norm_weight, self.a, self.b.size(2), self.ranks, self.order, self.blocks)

    def room_for_shrunk(self, x: Tensor) -> Shrunk:
        """Allocates the partials for rows x [T, in]; `launch` fills them."""
        return Shrunk(self._shrinker(x).room_for_sums(x, self.a), self)

    def deltas(self, x: Tensor, norm_weight: Tensor | None = None) -> Deltas:
        """Multiplies rows x [T, in], as `shrunk` does, with `a` and `b`."""
        from . import cuda_one_token

        if not cuda_one_token.is_the_choice(x):
            return self.shrunk(x, norm_weight).deltas()
        matrices, parts = (self.a, self.b, self.ranks), (self.second, self.third)
        operands = cuda_one_token.OneToken(x, norm_weight, *matrices, self.slots, *parts)
        return cuda_one_token.one_token(operands), self.slots


class Shrunk(NamedTuple):
    """A layer's input times `a`, for `b`."""

    sums: Tensor
    """float32 [splits, T, parts * room]: split-K partials; one split by `cuda_shrink`."""
    of: Operands

    def launch(self, x: Tensor) -> None:
        """Fills `sums` from rows x [T, in], by a plain launch: it may run beside another kernel."""
        self.of._shrinker(x).launch_shrink(self.of._to_shrink(x, None), self.sums, plain=True)

    def add_to(self, product: Tensor, *, plain: bool = False) -> None:
        """Adds `b` times the sums to dense rows [T, out], by a plain launch if asked."""
        self._expand(product, is_new=False, plain=plain)

    def put_to(self, new: Tensor, *, plain: bool = False) -> None:
        """Puts `b` times the sums into rows [T, out] that have nothing yet."""
        self._expand(new, is_new=True, plain=plain)

    def deltas(self) -> Deltas:
        """Returns `b` times the sums by themselves."""
        new = self.sums.new_empty(self.of.slots.size(0), self.of.b.size(1), dtype=torch.float32)
        self.put_to(new)
        return new, self.of.slots

    def _expand(self, product: Tensor, *, is_new: bool, plain: bool = False) -> None:
        from .triton_expand import expand

        parts, grouped = (self.of.second, self.of.third), (self.of.ranks, self.of.order, self.of.blocks)
        expand(self.sums, self.of.b, *parts, *grouped, product, is_new, plain)
