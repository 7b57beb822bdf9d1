# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""A draw in one pass over the logits: the noise exists in registers only.

In plain torch it takes some twenty passes over [n, vocab] in 64-bit integers, more than a whole decode step.
Plain requests are drawn here, and those whose filters cut off what `triton_adjusted` has drawn for them.
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
"""Of a thread. The noise would take more, and too few programs would be left to read greedy rows fast."""


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
    cut,
    cut_at,
    best,
    best_at,
    row_stride,
    num_blocks,
    num_requests,
    width: tl.constexpr,
    block: tl.constexpr,
    verifies: tl.constexpr,
    has_cuts: tl.constexpr,
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
    taken = True
    if not has_cuts:
        taken = tl.load(is_taken + row) != 0
    wait_for_previous(dependent)
    if has_cuts:
        taken = tl.load(cut + at) < float("inf")
    found, found_at = float("-inf"), 0
    if taken:
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
            value += heat * noise_of(tl.load(seeds + row), tl.load(lengths + row) + ahead, column)
        found, found_at = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    # What is passed over here has no token; what is not cut keeps the one that it has.
    is_told = taken | (not has_cuts)
    tl.store(best + at * num_blocks + part, found, is_told)
    tl.store(best_at + at * num_blocks + part, part * block + found_at, is_told)


@custom_op("best_of_blocks")
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
    found = _outputs(logits)
    asked = (is_taken, temperature, seeds, lengths)
    _launch(logits, rows, asked, found, found, _block(logits), verifies=verifies, has_cuts=False)
    return found


@best_of_blocks.register_fake
def _(logits: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    return _outputs(logits)


def draw_again(
    logits: Tensor,
    rows: Tensor,
    asked: tuple[Tensor, Tensor, Tensor],
    cuts: tuple[Tensor, Tensor],
    best: tuple[Tensor, Tensor],
    block: int,
) -> None:
    """Put the best of what the cuts leave into `best` [n, blocks]; a row that is cut at +inf stays as it is.

    `asked`: temperature, seeds and lengths, by request row.
    """
    _launch(logits, rows, (rows, *asked), cuts, best, block, verifies=False, has_cuts=True)


def _block(logits: Tensor) -> int:
    return min(_BLOCK, next_power_of_2(logits.size(1)))


def _outputs(logits: Tensor) -> tuple[Tensor, Tensor]:
    shape = logits.size(0), cdiv(logits.size(1), _block(logits))
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _launch(
    logits: Tensor,
    rows: Tensor,
    asked: tuple[Tensor, ...],
    cuts: tuple[Tensor, Tensor],
    best: tuple[Tensor, Tensor],
    block: int,
    *,
    verifies: bool,
    has_cuts: bool,
) -> None:
    (num_rows, width), num_blocks = logits.shape, best[0].size(1)
    _noisy_best_of_block[(num_blocks, num_rows)](
        logits,
        rows,
        *asked,
        *cuts,
        *best,
        logits.stride(0),
        num_blocks,
        rows.size(0),
        width=width,
        block=block,
        verifies=verifies,
        has_cuts=has_cuts,
        greedy_below=GREEDY_BELOW,
        num_warps=4 if block <= _BLOCK else 8,
        enable_fp_fusion=True,
        maxnreg=_REGISTERS,
        **dependent_launch.options(logits.device),
    )
