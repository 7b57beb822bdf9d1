"""A matrix as the kernels of linear layers and the table of choices see it.

What a weight is stored as is its format. Kernels are made for one; whatever takes a weight says which formats
it can, and refuses others by name.
"""

from typing import Literal, NamedTuple

from torch import Tensor

from ..registry import PLAIN, FormatError
from .choice import choose_for
from .tiles import Library, Tile

ShardDim = Literal[0, 1] | None
"""Which dimension tensor parallelism splits: 0 by output, 1 by input, None not at all."""


class Weight(NamedTuple):
    """A matrix [out, in]."""

    tensor: Tensor
    """Its elements, as the format stores them."""
    scales: Tensor | None = None
    """What they are multiplied with, where the format has such."""
    format: str = PLAIN
    shard_dim: ShardDim = None
    parts: tuple[int, ...] = ()
    """Rows of each matrix of the checkpoint that lies in it, one below the other; () if it is one."""


def plain(weight: Weight, taker: str) -> Tensor:
    """Returns the matrix of a weight in the plain format; `taker` can take no other."""
    if weight.format != PLAIN:
        raise FormatError(
            f"{taker} cannot take a weight of format {weight.format!r}; it takes those of format {PLAIN!r}"
        )
    return weight.tensor


def tile_for(x: Tensor, weight: Weight, *, gated: bool) -> Tile:
    """Returns the tile for the product of rows x with a weight; on a CPU that of the library."""
    matrix = plain(weight, "the kernel table")
    return choose_for(matrix, gated, x.size(0), x.dtype, x.device) if x.is_cuda else Library()
