"""Adapters in plain torch, in shapes that do not depend on which adapters a step has."""

import torch
from torch import Tensor

from .rows import Rows
from .stack import Stack

_MOST_GATHERED_BYTES = 64 << 20
"""Of copies of adapters' matrices, one for each token; with more, every slot takes all tokens."""


def add_in_torch(x: Tensor, product: Tensor, stack: Stack, rows: Rows) -> None:
    """See `low_rank.add`."""
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
    """x [..., T, in] through a [..., parts * room, in] and b [..., out, room]."""
    shrunk = x @ a.transpose(-1, -2)
    expanded = [
        inner @ matrix.transpose(-1, -2)
        for inner, matrix in zip(shrunk.split(stack.room, -1), b.split(list(stack.parts), -2), strict=True)
    ]
    return torch.cat(expanded, dim=-1)
