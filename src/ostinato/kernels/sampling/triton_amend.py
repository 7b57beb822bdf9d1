# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""The end of a step in which requests ask for more: their tokens, counts and log-probabilities.

What raw logits tell (`triton_row_end`) is found while others still draw. Of rows with filters it is found out
whether these leave what was drawn (`filters.triton_candidate`); if not, the row is left to the next kernels,
`filters.triton_find_cuts` and `triton_redraw`.
The last CTA of a request to end writes to the host; where neither is asked for, the first.
"""

import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..dependent_launch import wait_for_previous
from .asked import Asked
from .filters.triton_candidate import KEPT, block_to_judge, note_before, verdict_of
from .filters.triton_cuts import Verdicts, judging_constants
from .filters.triton_survey import filters_of
from .token_lines import LINE_HEAD, LogprobLines, TokenLines
from .triton_adjusted import Drawn, has_penalties
from .triton_draw import token_of_row
from .triton_row_end import Parts, note_rank, raw_block, write_row


@triton.jit(
    do_not_specialize=["line_length", "num_lines", "most_rows"],
    do_not_specialize_on_alignment=["rows", "places", "last_tokens", "counts", "ring"],
)
def _amend(
    logits,
    rows,
    places,
    temperature,
    top_k,
    top_p,
    min_p,
    repetition,
    presence,
    frequency,
    num_logprobs,
    adjusted,
    block_best,
    block_sum,
    block_lead,
    drawn,
    drawn_at,
    arrived,
    before,
    verdicts,
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
    num_groups,
    num_blocks,
    line_length,
    num_lines,
    most_rows,
    has_filters: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    capacity: tl.constexpr,
    head: tl.constexpr,
    parts_block: tl.constexpr,
    most_top: tl.constexpr,
    num_values: tl.constexpr,
    greedy_below: tl.constexpr,
    timed: tl.constexpr,
    dependent: tl.constexpr,
):
    at, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    row, place = tl.load(rows + at).to(tl.int64), tl.load(places + at).to(tl.int64)
    asked = tl.load(num_logprobs + row)
    counted = has_penalties(tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row))
    if has_filters:
        heat, k, p, share, by_count, by_mass, is_filtered = filters_of(
            rows, at, temperature, top_k, top_p, min_p, width, greedy_below
        )
    is_told = (row != 0) & (asked >= 0)
    logits += place * row_stride
    column = part * block + tl.arange(0, block)
    # Raw logits and the line are older than the first of these kernels: see `triton_adjusted`.
    number = (tl.load(counts) - 1) % num_lines
    x = tl.load(logits + column, mask=column < tl.where(is_told, width, 0), other=float("-inf"))
    if is_told:
        raw_block(x, column, asked, at * num_blocks + part, part_best, part_sum, top, width, most_top)
    wait_for_previous(dependent)
    is_last = (row != 0) & (part == 0)
    meets = is_told
    if has_filters:
        meets = is_told | is_filtered
        judged = block_to_judge(adjusted, at, part, by_count, by_mass, width, block)
    token = tl.full([], 0, tl.int64)
    if is_last | meets:
        token = token_of_row(drawn, drawn_at, at, num_blocks, width, parts_block)
    if has_filters:
        note_before(
            judged, adjusted, at, part, token, heat, by_count, by_mass, block_best, before, num_blocks,
            width, block, parts_block,
        )  # fmt: skip
    if is_told:
        note_rank(x, logits, token, at * num_blocks + part, part_rank)
    if meets:
        tl.debug_barrier()  # every thread has stored what it found
        is_last = tl.atomic_add(arrived + 2 * at, 1) == num_blocks - 1
    if has_filters and (is_last & is_filtered):
        verdict = verdict_of(
            adjusted, at, token, before, heat, k, p, share, by_count, by_mass,
            block_best, block_sum, block_lead, num_groups, num_blocks, width, capacity, parts_block,
        )  # fmt: skip
        tl.store(verdicts + at, verdict)
        tl.store(arrived + 2 * at, 0)
        is_last = verdict == KEPT
    if is_last:
        write_row(
            logits, at, row, place, token, asked, counted, number, top, part_best, part_sum, part_rank,
            generated, last_tokens, ring, values, tokens, ranks, num_blocks, line_length, most_rows,
            width, head, parts_block, most_top, num_values, timed,
        )  # fmt: skip


def amend(
    logits: Tensor,
    rows: Tensor,
    places: Tensor,
    asked: Asked,
    drawn: Drawn,
    verdicts: Verdicts,
    parts: Parts,
    lines: TokenLines,
    logprobs: LogprobLines,
    *,
    has_filters: bool,
) -> None:
    """Write the tokens of n requests over those in the newest line, and what else is to be told of them.

    Padding's row 0 writes nothing, and so do rows that do not keep what was drawn: see `verdicts`.
    """
    ring = lines.ring
    _amend[(drawn.num_blocks, rows.size(0))](
        logits,
        rows,
        places,
        asked.temperature,
        asked.top_k,
        asked.top_p,
        asked.min_p,
        asked.repetition,
        asked.presence,
        asked.frequency,
        asked.num_logprobs,
        drawn.logits,
        *drawn.surveyed[1:],
        *drawn.best,
        drawn.arrived,
        *verdicts,
        *parts,
        asked.generated,
        lines.last_tokens,
        ring,
        lines.counts,
        *logprobs,
        logits.stride(0),
        drawn.surveyed.group_best.size(1),
        drawn.num_blocks,
        ring.size(1),
        ring.size(0),
        logprobs.values.size(1),
        has_filters=has_filters,
        head=LINE_HEAD,
        most_top=parts.top.size(2),
        num_values=logprobs.values.size(2),
        timed=logits.is_cuda,
        **judging_constants(logits.size(1)),
        enable_fp_fusion=True,
        **dependent_launch.options(logits.device),
    )
