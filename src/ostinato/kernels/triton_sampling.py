# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""`sampling.sample` in one pass over the logits, cuts given: the noise exists in registers only.

In plain torch it takes some twenty passes over [n, vocab] in 64-bit integers, more than a whole decode step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import dependent_launch
from .custom_op import custom_op
from .dependent_launch import wait_for_previous
from .triton_rows import join_best

_BLOCK = 4096


@triton.jit
def _mix64(x):
    """splitmix64's finaliser, as in `sampling`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel(key, column):
    """Standard Gumbel noise of a row's key for these columns; see Note [Counter-based randomness]."""
    bits = _mix64(key + (column + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    u = ((bits >> 1) | 1).to(tl.float32) * 1.0842021724855044e-19  # 2**-63
    u = tl.minimum(u, 0.99999994)
    # Small values win, so they keep their digits: -log1p(-u) by its series where 1 - u would lose them.
    exponential = tl.where(u < 1e-3, u + u * u * (0.5 + u * 0.33333334), -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit(do_not_specialize=["num_blocks"])
def _noisy_best_of_block(
    logits,
    temperature,
    seeds,
    positions,
    cut,
    cut_at,
    best,
    best_at,
    row_stride,
    num_blocks,
    width: tl.constexpr,
    block: tl.constexpr,
    has_cuts: tl.constexpr,
    greedy_below: tl.constexpr,
    dependent: tl.constexpr,
):
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = part * block + tl.arange(0, block)
    wait_for_previous(dependent)
    value = tl.load(logits + row * row_stride + column, mask=column < width, other=float("-inf"))
    value = value.to(tl.float32)
    heat = tl.load(temperature + row)
    any_left = True
    if has_cuts:
        least, last = tl.load(cut + row), tl.load(cut_at + row)
        is_left = (value > least) | ((value == least) & (column <= last))
        value = tl.where(is_left, value, float("-inf"))
        any_left = tl.max(value, 0) > float("-inf")
    # Most blocks have nothing left of a row that is cut short: no noise for them.
    if (heat >= greedy_below) & any_left:
        seed = tl.load(seeds + row).to(tl.uint64)
        position = tl.load(positions + row).to(tl.uint64)
        key = _mix64(_mix64(seed + 0x9E3779B97F4A7C15) + position * 0x9E3779B97F4A7C15)
        value += heat * _gumbel(key, column)
    found, at = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * num_blocks + part, found)
    tl.store(best_at + row * num_blocks + part, part * block + at)


@custom_op("sample_rows")
def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    greedy_below: float,
    cut: Tensor | None = None,
    cut_at: Tensor | None = None,
) -> Tensor:
    """int64 [n]: a token for each row of logits [n, vocab], of those that the cuts of `filters` leave."""
    num_rows, width = logits.shape
    block = min(_BLOCK, triton.next_power_of_2(width))
    num_blocks = triton.cdiv(width, block)
    best = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    best_at = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    _noisy_best_of_block[(num_blocks, num_rows)](
        logits,
        temperature,
        seeds,
        positions,
        best if cut is None else cut,
        best_at if cut_at is None else cut_at,
        best,
        best_at,
        logits.stride(0),
        num_blocks,
        width=width,
        block=block,
        has_cuts=cut is not None,
        greedy_below=greedy_below,
        num_warps=8,
        **dependent_launch.options(logits.device),
    )
    return join_best(best, best_at, width)


@sample_rows.register_fake
def _(logits: Tensor, *others: object) -> Tensor:
    return torch.empty(logits.size(0), dtype=torch.int64, device=logits.device)
