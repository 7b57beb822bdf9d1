# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Rows whose filters cut off what was drawn: a token drawn from what they leave.

Most steps have no such row, and then this kernel looks at the verdicts and returns. What `triton_amend` does
for other rows is done here at the end, behind a meeting: see Note [CTAs that wait for each other].
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..dependent_launch import wait_for_previous
from ..gpu import gpu_of
from ..host_sizes import cdiv
from .asked import Asked
from .filters.triton_candidate import KEPT
from .filters.triton_cuts import Cuts, block_constants
from .filters.triton_meeting import MEETING_REGISTERS, blocks_each_of, meet
from .filters.triton_survey import filters_of
from .token_lines import LINE_HEAD, LogprobLines, TokenLines
from .triton_adjusted import Drawn, has_penalties
from .triton_draw import noise_of, token_of_row
from .triton_row_end import Parts, note_rank, write_row


@triton.jit
def _best_that_is_left(logits, column, least, last, heat, seed, length, width: tl.constexpr):
    """(value, index) of the best of a block's tokens that a cut leaves, noise included."""
    value = tl.load(logits + column, mask=column < width, other=float("-inf"))
    is_left = (value > least) | ((value == least) & (column <= last))
    value = tl.where(is_left, value, float("-inf"))
    # Most blocks have nothing left of a row that is cut short: no noise for them.
    if tl.max(value, 0) > float("-inf"):
        value += heat * noise_of(seed, length, column)
    return tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)


@triton.jit(
    do_not_specialize=["blocks_each", "line_length", "num_lines", "most_rows"],
    do_not_specialize_on_alignment=["rows", "places", "last_tokens", "counts", "ring"],
)
def _redraw(
    rows,
    temperature,
    seeds,
    lengths,
    top_k,
    top_p,
    min_p,
    adjusted,
    drawn,
    drawn_at,
    arrived,
    verdicts,
    cut,
    cut_at,
    num_blocks,
    blocks_each,
    logits,
    places,
    repetition,
    presence,
    frequency,
    num_logprobs,
    top,
    part_best,
    part_sum,
    part_rank,
    generated,
    last_tokens,
    ring,
    counts,
    values,
    tokens,
    ranks,
    row_stride,
    line_length,
    num_lines,
    most_rows,
    draws: tl.constexpr,
    returns: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    parts_block: tl.constexpr,
    greedy_below: tl.constexpr,
    head: tl.constexpr,
    most_top: tl.constexpr,
    num_values: tl.constexpr,
    timed: tl.constexpr,
    dependent: tl.constexpr,
):
    """Draw from what the cuts leave, then return the tokens; both in one launch where CTAs can meet."""
    at, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    heat, _, _, _, _, _, is_filtered = filters_of(
        rows, at, temperature, top_k, top_p, min_p, width, greedy_below
    )
    wait_for_previous(dependent)
    verdict = KEPT
    if is_filtered:
        verdict = tl.load(verdicts + at)
    if verdict != KEPT:
        first, behind = part * blocks_each, tl.minimum((part + 1) * blocks_each, num_blocks)
        raw, lines, num_arrived = logits, adjusted + at * width, 0
        row = tl.load(rows + at).to(tl.int64)
        if draws:
            least, last_left = tl.load(cut + at), tl.load(cut_at + at)
            seed, length = tl.load(seeds + row), tl.load(lengths + row)
            for number in range(first, behind):
                column = number * block + tl.arange(0, block)
                most, index = _best_that_is_left(lines, column, least, last_left, heat, seed, length, width)
                tl.store(drawn + at * num_blocks + number, most)
                tl.store(drawn_at + at * num_blocks + number, number * block + index)
        if returns:
            if draws:
                num_arrived = tl.num_programs(0)
                meet(arrived + 2 * at, num_arrived)
            place, asked = tl.load(places + at).to(tl.int64), tl.load(num_logprobs + row)
            raw += place * row_stride
            token = token_of_row(drawn, drawn_at, at, num_blocks, width, parts_block)
            is_last = part == 0
            if asked >= 0:
                for number in range(first, behind):
                    column = number * block + tl.arange(0, block)
                    x = tl.load(raw + column, mask=column < width, other=float("-inf"))
                    note_rank(x, raw, token, at * num_blocks + number, part_rank)
                tl.debug_barrier()  # every thread has stored what it found
                # Behind those that met, at the same place.
                is_last = tl.atomic_add(arrived + 2 * at, 1) == num_arrived + tl.num_programs(0) - 1
            if is_last:
                counted = has_penalties(
                    tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row)
                )
                line = (tl.load(counts) - 1) % num_lines
                write_row(
                    raw, at, row, place, token, asked, counted, line, top, part_best, part_sum, part_rank,
                    generated, last_tokens, ring, values, tokens, ranks, num_blocks, line_length, most_rows,
                    width, head, parts_block, most_top, num_values, timed,
                )  # fmt: skip


def redraw(rows: Tensor, asked: Asked, drawn: Drawn, verdicts: Tensor, cuts: Cuts) -> None:
    """Put the best of what `cuts` leave into `drawn.best`, of rows whose verdict is not `KEPT`."""
    unused = dict.fromkeys(_OF_LINES, rows)
    sizes = {"head": 0, "most_top": 0, "num_values": 0, "timed": False}
    _launch(rows, asked, drawn, verdicts, cuts, unused | sizes, draws=True, returns=False)


def redraw_and_return(
    logits: Tensor,
    rows: Tensor,
    places: Tensor,
    asked: Asked,
    drawn: Drawn,
    verdicts: Tensor,
    cuts: Cuts,
    parts: Parts,
    lines: TokenLines,
    logprobs: LogprobLines,
) -> None:
    """The same, and then what `triton_amend.amend` does for other rows, which has left `parts`."""
    ring = lines.ring
    told = (places, asked.repetition, asked.presence, asked.frequency, asked.num_logprobs, *parts)
    kept = (asked.generated, lines.last_tokens, ring, lines.counts, *logprobs)
    sizes = (logits.stride(0), ring.size(1), ring.size(0), logprobs.values.size(1))
    of_lines = dict(zip(_OF_LINES, (logits, *told, *kept, *sizes), strict=True))
    of_lines |= {"head": LINE_HEAD, "most_top": parts.top.size(2), "num_values": logprobs.values.size(2)}
    of_lines |= {"timed": logits.is_cuda}
    if dependent_launch.INTERPRETED:
        _launch(rows, asked, drawn, verdicts, cuts, of_lines, draws=True, returns=False)
        _launch(rows, asked, drawn, verdicts, cuts, of_lines, draws=False, returns=True)
    else:
        _launch(rows, asked, drawn, verdicts, cuts, of_lines, draws=True, returns=True)


_OF_LINES = _redraw.arg_names[_redraw.arg_names.index("logits") : _redraw.arg_names.index("draws")]
"""Arguments that tell where tokens are returned to."""


def _launch(
    rows: Tensor,
    asked: Asked,
    drawn: Drawn,
    verdicts: Tensor,
    cuts: Cuts,
    of_lines: dict[str, Any],
    *,
    draws: bool,
    returns: bool,
) -> None:
    num_rows, width = drawn.logits.shape
    device, num_blocks = drawn.logits.device, drawn.num_blocks
    blocks_each = blocks_each_of(num_rows, num_blocks, gpu_of(device))
    _redraw[(cdiv(num_blocks, blocks_each), num_rows)](
        rows,
        asked.temperature,
        asked.seeds,
        asked.lengths,
        asked.top_k,
        asked.top_p,
        asked.min_p,
        drawn.logits,
        *drawn.best,
        drawn.arrived,
        verdicts,
        cuts.value,
        cuts.last,
        num_blocks,
        blocks_each,
        **of_lines,
        draws=draws,
        returns=returns,
        maxnreg=MEETING_REGISTERS,
        **block_constants(width),
        enable_fp_fusion=True,
        **dependent_launch.options(device),
    )
