"""Blocks of keys and values for which attention has room in a GPU's shared memory."""

from dataclasses import dataclass

import torch

from ..gpu import Gpu
from ..host_sizes import next_power_of_2
from .errors import BackendError


@dataclass(frozen=True)
class KeyBlocks:
    """How keys and values come to products with many queries."""

    keys: int
    """At a time."""
    num_stages: int
    """Triton counts the way from a page's number to its keys as a stage of its own, so that five of them have
    two blocks on their way."""

    def shared_bytes(self, dtype: torch.dtype, head_dim: int, queries: int) -> int:
        """That a program takes at most: its queries, the blocks, and some for scores and sums."""
        blocks = max(1, self.num_stages - 2)
        head = max(16, next_power_of_2(head_dim)) * dtype.itemsize
        scores = queries * self.keys * dtype.itemsize if dtype == torch.float32 else 0
        return head * (queries + 2 * blocks * self.keys) + scores + (1 << 10)


def key_blocks(
    dtype: torch.dtype, head_dim: int, queries: int, stages: tuple[int, ...], gpu: Gpu, programs: int
) -> KeyBlocks:
    """The largest blocks, with most of them on their way, with which so many programs have room.

    Or the smallest, if one program has.
    """
    # float32 products need more registers.
    sizes, stages = ((32, 16), (2,)) if dtype == torch.float32 else ((64, 32, 16), stages)
    all_blocks = [KeyBlocks(keys, num_stages) for keys in sizes for num_stages in stages]
    for blocks in all_blocks:
        if blocks.shared_bytes(dtype, head_dim, queries) <= gpu.room_for(programs):
            return blocks
    needed = all_blocks[-1].shared_bytes(dtype, head_dim, queries)
    if needed > gpu.room_for(1):
        raise BackendError(
            f"triton attention of heads of {head_dim} in {dtype} takes {needed} bytes of shared memory and "
            f"this GPU has {gpu.room_for(1)} for a program: use the torch backend"
        )
    return all_blocks[-1]
