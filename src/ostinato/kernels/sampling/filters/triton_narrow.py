# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Passes over wide rows by many CTAs: the range of the cut, and at last the tokens in it.

A pass begins where the one before it ended: it adds up what that one's CTAs found, which tells the range
that is left, and looks from new pivots. Sums are kept block by block, however many blocks a CTA takes, so
that a cut does not depend on the number of rows beside it. Each block of a row collects the tokens in the
range that the last pass finds into a segment of its own: they stay in the order of their ids.
"""

import triton
import triton.language as tl

from .triton_search import LOWEST_KEY, PIVOTS, even_values, key_of, narrowed, weights_from
from .triton_survey import LOG2_E

_TAKEN = tl.constexpr(16)
"""Tokens of every block's segment that are moved at a time."""


@triton.jit
def range_before(
    round, row, num_rows, ranges, range_sums, sums, num_blocks, best, lowest, target,
    parts_block: tl.constexpr,
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
        pivots = even_values(low, high, lowest, PIVOTS)
        low, high, above = narrowed(low, high, above, pivots, tl.sum(found, 0), target)
    return low, high, above


@triton.jit
def narrow(
    logits, row, round, first, end, num_rows, num_blocks, ranges, range_sums, sums, counts, segments,
    best, lowest, heat, by_count, target, is_last,
    width: tl.constexpr, block: tl.constexpr, segment: tl.constexpr, parts_block: tl.constexpr,
):  # fmt: skip
    """One pass over the blocks from `first` to `end` of a wide row: sums from pivots on; the last pass
    collects what is left of the range."""
    column = first * block + tl.arange(0, block)
    x = tl.load(logits + column, mask=column < width, other=float("-inf"))
    low, high, above = range_before(
        round, row, num_rows, ranges, range_sums, sums, num_blocks, best, lowest, target, parts_block
    )  # fmt: skip
    place = round * num_rows + row
    if first == 0:
        tl.store(ranges + 2 * place, low.to(tl.int32))
        tl.store(ranges + 2 * place + 1, high.to(tl.int32))
        tl.store(range_sums + place, above)
    pivots = even_values(low, high, lowest, PIVOTS)
    limit = tl.minimum(end * block, width)
    for number in range(first, end):
        keys = key_of(x)
        if is_last:
            chosen = ((column < width) & (keys >= low) & (keys < high)).to(tl.int32)
            nth = tl.cumsum(chosen, 0) - chosen
            collected = segments + (row * num_blocks + number) * segment
            tl.store(collected + nth, column, (chosen > 0) & (nth < segment))
            tl.store(counts + row * num_blocks + number, tl.sum(chosen, 0))
        else:
            weights = tl.where(by_count, 1.0, tl.exp2((x - best) * (LOG2_E / heat)))
            weights = tl.where(column < width, weights, 0.0)
            added_up = sums + (place * num_blocks + number) * PIVOTS
            tl.store(added_up + tl.arange(0, PIVOTS), weights_from(keys, weights, pivots))
        column += block
        x = tl.load(logits + column, mask=column < limit, other=float("-inf"))


@triton.jit
def take_segments(
    row, counts, segments, found, num_blocks,
    width: tl.constexpr, parts_block: tl.constexpr, segment: tl.constexpr, capacity: tl.constexpr,
):  # fmt: skip
    """Join what the blocks collected; how many, or more than `capacity` if some were left out."""
    parts = tl.arange(0, parts_block)
    number = tl.load(counts + row * num_blocks + parts, mask=parts < num_blocks, other=0)
    total = tl.sum(number, 0)
    if (tl.max(number, 0) > segment) | (tl.min(number, 0) < 0):
        total = capacity + 1
    start = tl.cumsum(number, 0) - number
    of_part = segments + (row * num_blocks + parts) * segment
    for first in range(0, tl.where(total <= capacity, tl.max(number, 0), 0), _TAKEN):
        nth = (first + tl.arange(0, _TAKEN))[None, :]
        held = nth < number[:, None]
        column = tl.load(of_part[:, None] + nth, mask=held, other=0)
        # Legal also where `narrow` did not run, as when kernels are only compiled.
        tl.store(found + start[:, None] + nth, tl.minimum(tl.maximum(column, 0), width - 1), held)
    tl.debug_barrier()
    return total
