"""How decode attention divides its work: by the number of tokens and heads, as measured on an H200."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch

# Programs that a split batch should have, and how many need no splitting.
_PROGRAMS_WANTED = 256
_ENOUGH_PROGRAMS = 96
MAX_SPLITS = 32
"""Parts of the context per token and KV head, at most."""


@dataclass(frozen=True)
class DecodeTile:
    """How a program works; one choice per dtype and kind of batch, so few variants are compiled."""

    key_block: int
    """Keys at a time."""
    least_blocks: int
    """Blocks of keys that a split has at least: short contexts are not split, for joining costs more."""
    num_warps: int
    num_stages: int
    ahead: bool
    """Hold the next tiles in registers, the first ones loaded before the wait; else copy ahead into shared
    memory, which leaves registers for more programs."""


def decode_tile(dtype: torch.dtype, num_tokens: int) -> DecodeTile:
    """The tile for a batch; measured on an H200 (docs/kernels.md)."""
    if dtype == torch.float32:
        return DecodeTile(key_block=32, least_blocks=1, num_warps=4, num_stages=2, ahead=False)
    if num_tokens == 1:
        return DecodeTile(key_block=32, least_blocks=1, num_warps=8, num_stages=1, ahead=True)
    if num_tokens <= 8:
        return DecodeTile(key_block=64, least_blocks=4, num_warps=8, num_stages=1, ahead=True)
    if num_tokens <= 48:
        return DecodeTile(key_block=64, least_blocks=4, num_warps=4, num_stages=1, ahead=True)
    # A program of one warp has nobody to wait for, and many of them hide each other's latency.
    return DecodeTile(key_block=32, least_blocks=8, num_warps=1, num_stages=3, ahead=False)


def num_splits_of(num_tokens: int, num_kv_heads: int) -> int:
    """Parts of the context per token and KV head, enough to fill a GPU."""
    programs = num_tokens * num_kv_heads
    if programs >= _ENOUGH_PROGRAMS:
        return 1
    return min(MAX_SPLITS, _PROGRAMS_WANTED // programs)


def decode_class(num_tokens: int, num_kv_heads: int, dtype: torch.dtype) -> Hashable:
    """Equal for batches that run the same compiled kernels."""
    return decode_tile(dtype, num_tokens), num_splits_of(num_tokens, num_kv_heads) > 1
