"""Adapters of low rank beside linear layers: many resident ones, any mix of them and of none in a step.

`Stack` holds the matrices of one linear layer for all slots, `Rows` says which slot each token of a step has,
`add` adds what the adapters make of a layer's input to its product.
"""

from .adapters import Adapted, Adapters, adapted_by
from .low_rank import add
from .rows import NO_ADAPTER, Rows
from .stack import LowRank, Stack, StackError

__all__ = [
    "NO_ADAPTER",
    "Adapted",
    "Adapters",
    "LowRank",
    "Rows",
    "Stack",
    "StackError",
    "adapted_by",
    "add",
]
