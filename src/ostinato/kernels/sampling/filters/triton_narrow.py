# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Passes over wide rows by many programs: the range of the cut, and at last the tokens in it.

A pass begins where the one before it ended: it adds up what that one's programs found, which tells the range
that is left, and looks from new pivots. Sums are kept block by block, however many blocks a program takes, so
that a cut does not depend on the number of rows beside it. Each block of a row collects the tokens in the
range that the last pass finds into a segment of its own: they stay in the order of their ids.

The first pass also adds up what is before the candidate of every row, wide or not (`triton_candidate`). The
last of a row's programs to end then knows the verdict: by it everybody behind goes on, or returns at once.
"""

import triton
import triton.language as tl

from ...dependent_launch import wait_for_previous
from ..triton_best import token_of_row
from .triton_candidate import WIDE, verdict_of
from .triton_search import LOWEST_KEY, PIVOTS, even_values, key_of, narrowed, weights_from
from .triton_survey import LOG2_E, facts_of, filters_of, may_be_wide


@triton.jit
def range_before(
    round, row, num_rows, ranges, range_sums, sums, num_blocks, best, worst, heat, p, mass,
    by_count, target, width: tl.constexpr, parts_block: tl.constexpr,
):  # fmt: skip
    """(low, high, above) before this pass: from the range and the sums that the pass before it left."""
    low, high = tl.full([], LOWEST_KEY, tl.int64), key_of(best).to(tl.int64) + 1
    above = tl.full([], 0.0, tl.float32)
    if round > 0:
        place = (round - 1) * num_rows + row
        low, high = tl.load(ranges + 2 * place).to(tl.int64), tl.load(ranges + 2 * place + 1).to(tl.int64)
        above = tl.load(range_sums + place)
        parts, i = tl.arange(0, parts_block), tl.arange(0, PIVOTS)
        found = tl.load(
            sums + (place * num_blocks + parts[:, None]) * PIVOTS + i[None, :],
            mask=(parts < num_blocks)[:, None],
            other=0.0,
        )
        pivots = even_values(low, high, best, worst, heat, p, mass, by_count, width, PIVOTS)
        low, high, above = narrowed(low, high, above, pivots, tl.sum(found, 0), target)
    return low, high, above


@triton.jit(do_not_specialize=("round", "num_rows", "blocks_each"), do_not_specialize_on_alignment=("rows",))
def narrow(
    logits,
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    block_best,
    block_sum,
    block_lead,
    ranges,
    range_sums,
    sums,
    counts,
    segments,
    drawn,
    drawn_at,
    before,
    verdicts,
    arrived,
    row_stride,
    num_groups,
    num_blocks,
    num_rows,
    blocks_each,
    round,
    is_last: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    segment: tl.constexpr,
    capacity: tl.constexpr,
    parts_block: tl.constexpr,
    greedy_below: tl.constexpr,
    dependent: tl.constexpr,
):
    """One pass over wide rows: sums from pivots on; the last one collects what is left of the range."""
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    # What rows ask for is on the device before the step.
    heat, k, p, share, by_count, by_mass, any_filter = filters_of(
        rows, row, temperature, top_k, top_p, min_p, width, greedy_below
    )
    wait_for_previous(dependent)
    is_first = False if is_last else round == 0
    going = any_filter & is_first
    if may_be_wide(k, by_count, by_mass, num_groups) & (round > 0):
        going = tl.load(verdicts + row) == WIDE
    if going:
        logits += row * row_stride
        first, end = part * blocks_each, tl.minimum((part + 1) * blocks_each, num_blocks)
        end = tl.where(by_count | by_mass, end, first)
        limit = tl.minimum(end * block, width)
        column = first * block + tl.arange(0, block)
        x = tl.load(logits + column, mask=column < limit, other=float("-inf"))
        drawn_x, drawn_token = tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int64)
        if is_first:
            drawn_token = token_of_row(drawn, drawn_at, row, num_blocks, width, parts_block)
            drawn_x = tl.load(logits + drawn_token)
        best, worst, mass, target, is_wide = facts_of(
            row, heat, k, p, by_count, by_mass, block_best, block_sum, block_lead, num_groups, num_blocks,
            width, capacity, parts_block,
        )  # fmt: skip
        drawn_key = key_of(drawn_x)
        low, high, above = range_before(
            round, row, num_rows, ranges, range_sums, sums, num_blocks, best, worst, heat, p, mass,
            by_count, target, width, parts_block,
        )  # fmt: skip
        place = round * num_rows + row
        if part == 0:
            tl.store(ranges + 2 * place, low.to(tl.int32))
            tl.store(ranges + 2 * place + 1, high.to(tl.int32))
            tl.store(range_sums + place, above)
        pivots = even_values(low, high, best, worst, heat, p, mass, by_count, width, PIVOTS)
        for number in range(first, end):
            keys = key_of(x)
            if is_last:
                chosen = ((column < width) & (keys >= low) & (keys < high)).to(tl.int32)
                nth = tl.cumsum(chosen, 0) - chosen
                to = segments + (row * num_blocks + number) * segment
                tl.store(to + nth, column, (chosen > 0) & (nth < segment))
                tl.store(counts + row * num_blocks + number, tl.sum(chosen, 0))
            else:
                weights = tl.where(by_count, 1.0, tl.exp2((x - best) * (LOG2_E / heat)))
                weights = tl.where(column < width, weights, 0.0)
                if is_first:
                    is_before = (keys > drawn_key) | ((keys == drawn_key) & (column < drawn_token))
                    behind = tl.sum(tl.where(is_before, weights, 0.0), 0)
                    tl.store(before + row * num_blocks + number, behind)
                if is_wide:
                    to = sums + (place * num_blocks + number) * PIVOTS
                    tl.store(to + tl.arange(0, PIVOTS), weights_from(keys, weights, pivots))
            column += block
            x = tl.load(logits + column, mask=column < limit, other=float("-inf"))
        if is_first:
            tl.debug_barrier()  # every thread has stored what it found
            if tl.atomic_add(arrived + row, 1) == tl.num_programs(0) - 1:
                verdict = verdict_of(
                    drawn_x, row, before, best, heat, share, by_count, by_mass, target, is_wide, num_blocks,
                    parts_block,
                )  # fmt: skip
                tl.store(verdicts + row, verdict)
                tl.store(arrived + row, 0)


@triton.jit
def take_segments(
    row, counts, segments, found, num_blocks,
    width: tl.constexpr, parts_block: tl.constexpr, segment: tl.constexpr, few: tl.constexpr,
    capacity: tl.constexpr,
):  # fmt: skip
    """Join what the blocks collected; how many, or more than `capacity` if some were left out."""
    parts = tl.arange(0, parts_block)
    number = tl.load(counts + row * num_blocks + parts, mask=parts < num_blocks, other=0)
    total = tl.sum(number, 0)
    if (tl.max(number, 0) > segment) | (tl.min(number, 0) < 0):
        total = capacity + 1
    ends = tl.cumsum(number, 0)
    for first in range(0, tl.where(total <= capacity, total, 0), few):
        i = first + tl.arange(0, few)
        behind = ends[:, None] <= i[None, :]
        part = tl.sum(behind.to(tl.int32), 0)
        start = tl.max(tl.where(behind, ends[:, None], 0), 0)
        column = tl.load(segments + (row * num_blocks + part) * segment + i - start, mask=i < total, other=0)
        # Legal also where `narrow` did not run, as when kernels are only compiled.
        tl.store(found + i, tl.minimum(tl.maximum(column, 0), width - 1), i < total)
    tl.debug_barrier()
    return total
