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
from .host_sizes import cdiv, next_power_of_2
from .triton_best import join_best

_BLOCK = 2048
_REGISTERS = 64
"""Of a thread. The noise would take more, and too few programs would be left to read greedy rows fast."""


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


@triton.jit(
    do_not_specialize=["num_blocks"],
    do_not_specialize_on_alignment=["rows", "is_taken", "temperature", "seeds", "lengths"],
)
def _noisy_best_of_block(
    logits,
    rows,
    is_taken,
    temperature,
    seeds,
    lengths,
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
    at, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = part * block + tl.arange(0, block)
    # What rows ask for is on the device before the step.
    row = tl.load(rows + at)
    heat = tl.load(temperature + row)
    taken = 1
    if not has_cuts:
        taken = tl.load(is_taken + row)
    wait_for_previous(dependent)
    found, found_at = float("-inf"), 0
    if taken != 0:
        value = tl.load(logits + at * row_stride + column, mask=column < width, other=float("-inf"))
        value = value.to(tl.float32)
        any_left = True
        if has_cuts:
            least, last = tl.load(cut + at), tl.load(cut_at + at)
            is_left = (value > least) | ((value == least) & (column <= last))
            value = tl.where(is_left, value, float("-inf"))
            any_left = tl.max(value, 0) > float("-inf")
        # Most blocks have nothing left of a row that is cut short: no noise for them.
        if (heat >= greedy_below) & any_left:
            seed = tl.load(seeds + row).to(tl.uint64)
            position = tl.load(lengths + row).to(tl.uint64)
            key = _mix64(_mix64(seed + 0x9E3779B97F4A7C15) + position * 0x9E3779B97F4A7C15)
            value += heat * _gumbel(key, column)
        found, found_at = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + at * num_blocks + part, found)
    tl.store(best_at + at * num_blocks + part, part * block + found_at)


def _best_of_blocks(
    logits: Tensor,
    rows: Tensor,
    asked: tuple[Tensor, Tensor, Tensor],
    greedy_below: float,
    *,
    is_taken: Tensor | None = None,
    cuts: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Of rows that are taken, or of all rows what the cuts leave."""
    num_rows, width = logits.shape
    block = min(_BLOCK, next_power_of_2(width))
    num_blocks = cdiv(width, block)
    best = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    best_at = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    _noisy_best_of_block[(num_blocks, num_rows)](
        logits,
        rows,
        rows if is_taken is None else is_taken,
        *asked,
        *(cuts or (best, best_at)),
        best,
        best_at,
        logits.stride(0),
        num_blocks,
        width=width,
        block=block,
        has_cuts=cuts is not None,
        greedy_below=greedy_below,
        num_warps=4,
        maxnreg=_REGISTERS,
        enable_fp_fusion=True,
        **dependent_launch.options(logits.device),
    )
    return best, best_at


@custom_op("best_of_blocks")
def best_of_blocks(
    logits: Tensor,
    rows: Tensor,
    is_taken: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    lengths: Tensor,
    greedy_below: float,
) -> tuple[Tensor, Tensor]:
    """float32 and int32 [n, blocks]: the best value and its token in each block of logits [n, vocab].

    Of requests that are not taken, -inf and any token. Everything but the logits is by request row.
    """
    return _best_of_blocks(logits, rows, (temperature, seeds, lengths), greedy_below, is_taken=is_taken)


@best_of_blocks.register_fake
def _(logits: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    shape = logits.size(0), cdiv(logits.size(1), min(_BLOCK, next_power_of_2(logits.size(1))))
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


@custom_op("sample_rows")
def sample_rows(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    lengths: Tensor,
    greedy_below: float,
    cut: Tensor,
    cut_at: Tensor,
) -> Tensor:
    """int64 [n]: a token for each row of logits [n, vocab], of those that the cuts of `filters` leave."""
    asked = (temperature, seeds, lengths)
    best, best_at = _best_of_blocks(logits, rows, asked, greedy_below, cuts=(cut, cut_at))
    return join_best(best, best_at, logits.size(1))


@sample_rows.register_fake
def _(logits: Tensor, *others: object) -> Tensor:
    return torch.empty(logits.size(0), dtype=torch.int64, device=logits.device)
