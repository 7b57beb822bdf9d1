"""LoRA beside linear layers: many resident adapters, any mix of them and of none in a step.

`Stack` holds the matrices of one linear layer for all slots, `Rows` says which slot each token of a step has,
`add` adds the adapters' part to a layer's product.
"""

from .adapter_rows import NO_ADAPTER, Adapted, Adapters, Rows, adapted_by
from .low_rank import add
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
