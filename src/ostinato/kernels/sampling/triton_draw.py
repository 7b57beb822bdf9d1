# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""A draw in one pass over the logits: the noise exists in registers only.

In plain torch it takes some twenty passes over [n, vocab] in 64-bit integers, more than a whole decode step.
Plain requests are drawn here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..constants import GREEDY_BELOW
from ..custom_op import custom_op
from ..dependent_launch import wait_for_previous
from ..host_sizes import cdiv, next_power_of_2

_BLOCK = 2048
_REGISTERS = 64
"""Of a thread. The noise would take more, and too few CTAs would be left to read greedy rows fast."""


@triton.jit
def _mix64(x):
    """splitmix64's finaliser, as in `sampling`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform_of(seed, position, column):
    """In (0, 1), a function of these alone; see Note [Counter-based randomness]."""
    key = _mix64(
        _mix64(seed.to(tl.uint64) + 0x9E3779B97F4A7C15) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    )
    bits = _mix64(key + (column + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    u = ((bits >> 1) | 1).to(tl.float32) * 1.0842021724855044e-19  # 2**-63
    return tl.minimum(u, 0.99999994)


@triton.jit
def noise_of(seed, position, column):
    """Standard Gumbel noise of a request for these tokens."""
    u = uniform_of(seed, position, column)
    # Small values win, so they keep their digits: -log1p(-u) by its series where 1 - u would lose them.
    exponential = tl.where(u < 1e-3, u + u * u * (0.5 + u * 0.33333334), -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit(
    do_not_specialize=["num_blocks", "num_requests"],
    do_not_specialize_on_alignment=["rows", "is_taken", "temperature", "seeds", "lengths"],
)
def _noisy_best_of_block(
    logits,
    rows,
    is_taken,
    temperature,
    seeds,
    lengths,
    best,
    best_at,
    row_stride,
    num_blocks,
    num_requests,
    width: tl.constexpr,
    block: tl.constexpr,
    verifies: tl.constexpr,
    greedy_below: tl.constexpr,
    dependent: tl.constexpr,
):
    at, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = part * block + tl.arange(0, block)
    # What rows ask for is on the device before the step.
    request, ahead = at, 0
    if verifies:  # several tokens of each request, the first of all of them first
        request, ahead = at % num_requests, at // num_requests + 1
    row = tl.load(rows + request)
    heat = tl.load(temperature + row)
    taken = tl.load(is_taken + row) != 0
    wait_for_previous(dependent)
    found, found_at = float("-inf"), 0
    if taken:
        value = tl.load(logits + at * row_stride + column, mask=column < width, other=float("-inf"))
        value = value.to(tl.float32)
        if heat >= greedy_below:
            value += heat * noise_of(tl.load(seeds + row), tl.load(lengths + row) + ahead, column)
        found, found_at = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + at * num_blocks + part, found)
    tl.store(best_at + at * num_blocks + part, part * block + found_at)


@custom_op("best_of_blocks", result=lambda logits: _outputs(logits))
def best_of_blocks(
    logits: Tensor,
    rows: Tensor,
    is_taken: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    lengths: Tensor,
    verifies: bool = False,
) -> tuple[Tensor, Tensor]:
    """float32 and int32 [n, blocks]: the best value and its token in each block of logits [n, vocab].

    Of requests that are not taken, -inf and any token. Everything but the logits is by request row.
    `verifies`: there are logits of several tokens of each request. Line i * R + r, of R rows, has those from
    which a token is drawn that stands i + 1 behind the length of request r.
    """
    (num_rows, width), block = logits.shape, _block(logits)
    best, best_at = _outputs(logits)
    num_blocks = best.size(1)
    _noisy_best_of_block[(num_blocks, num_rows)](
        logits,
        rows,
        is_taken,
        temperature,
        seeds,
        lengths,
        best,
        best_at,
        logits.stride(0),
        num_blocks,
        rows.size(0),
        width=width,
        block=block,
        verifies=verifies,
        greedy_below=GREEDY_BELOW,
        num_warps=4,
        enable_fp_fusion=True,
        maxnreg=_REGISTERS,
        **dependent_launch.options(logits.device),
    )
    return best, best_at


def _block(logits: Tensor) -> int:
    return min(_BLOCK, next_power_of_2(logits.size(1)))


def _outputs(logits: Tensor) -> tuple[Tensor, Tensor]:
    shape = logits.size(0), cdiv(logits.size(1), _block(logits))
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


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
    """Returns the `block` of `best_of_rows`."""
    return max(16, next_power_of_2(num_blocks))
