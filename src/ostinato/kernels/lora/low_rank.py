"""Adds what adapters make of a layer's input to its product."""

from torch import Tensor

from .adapters import Adapted
from .deltas import Operands
from .rows import Rows
from .stack import Stack
from .torch_reference import add_in_torch


def add(x: Tensor, product: Tensor, stack: Stack, rows: Rows) -> None:
    """`product[t] += b[slot] @ (a[slot] @ x[t])` with the slot of token t, part by part, in place.

    x [T, in]; `product` dense [T, out] in the type of x or float32. Rows of tokens without an adapter keep
    their bits, and what a token gets depends on no other token.
    """
    if rows.blocks is None:
        add_in_torch(x, product, stack, rows)
    else:
        Operands.of(Adapted(stack, rows)).shrunk(x).add_to(product)
