# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""The token of a row, from the best one of each block of the vocabulary."""

import triton
import triton.language as tl

from ..host_sizes import next_power_of_2


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


@triton.jit
def token_of_row(values, tokens, at, num_blocks, width, block: tl.constexpr):
    """`best_of_rows` of a single row."""
    one = tl.arange(0, 1)
    return tl.max(best_of_rows(values, tokens, at + one, one == 0, num_blocks, width, block), 0)


def joined_block(num_blocks: int) -> int:
    """The `block` of `best_of_rows`."""
    return max(16, next_power_of_2(num_blocks))
