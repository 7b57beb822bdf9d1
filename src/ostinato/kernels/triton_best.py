# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""The token of a row, from the best one of each block of the vocabulary."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import dependent_launch
from .dependent_launch import wait_for_previous
from .host_sizes import next_power_of_2


@triton.jit
def best_of_rows(values, tokens, at, inside, num_blocks, width, block: tl.constexpr):
    """int64: what `tokens` [rows, num_blocks] has beside the largest value of each of the rows `at`.

    Of equal ones the first; a row of nothing but NaN has none, and its token must still be a legal one.
    """
    k = tl.arange(0, block)[None, :]
    place = at.to(tl.int64)[:, None] * num_blocks + k
    held = inside[:, None] & (k < num_blocks)
    value = tl.load(values + place, held, other=float("-inf"))
    token = tl.load(tokens + place, held, other=0)
    is_best = held & (value == tl.max(value, 1)[:, None])
    found = tl.min(tl.where(is_best, token, width), 1)
    return tl.where((found < 0) | (found >= width), 0, found).to(tl.int64)


@triton.jit(do_not_specialize=["num_blocks", "width"])
def _join_best(values, tokens, out, num_blocks, width, block: tl.constexpr, dependent: tl.constexpr):
    at = tl.program_id(0) + tl.arange(0, 1)
    wait_for_previous(dependent)
    tl.store(out + at, best_of_rows(values, tokens, at, at >= 0, num_blocks, width, block))


def joined_block(num_blocks: int) -> int:
    """The `block` of `best_of_rows`."""
    return max(16, next_power_of_2(num_blocks))


def join_best(values: Tensor, tokens: Tensor, width: int) -> Tensor:
    """int64 [n], below `width`: `best_of_rows` of all rows of `tokens` [n, blocks]."""
    num_rows, num_blocks = values.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    _join_best[(num_rows,)](
        values,
        tokens,
        out,
        num_blocks,
        width,
        block=joined_block(num_blocks),
        num_warps=4,
        enable_fp_fusion=True,
        **dependent_launch.options(values.device),
    )
    return out
