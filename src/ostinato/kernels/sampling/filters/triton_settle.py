# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""The cut of a row by one CTA: among few tokens that are collected first.

What is collected: the tokens that reach a bound known from the groups' best ones; of a wide row those that
`triton_narrow` left. Should that be too many, passes over the row narrow the range further.
"""

import triton
import triton.language as tl

from .triton_narrow import take_segments
from .triton_search import (
    LOWEST_KEY,
    MOST_ROUNDS,
    PIVOTS,
    even_keys,
    even_values,
    key_of,
    lowest_of,
    narrowed,
    search,
    value_of,
    weights_from,
)
from .triton_survey import LOG2_E

_PIVOTS_OF_FEW = tl.constexpr(16)
_VALUE_ROUNDS = tl.constexpr(3)
"""Passes whose pivots divide a range of logits evenly; later ones divide the range of keys."""


@triton.jit
def list_groups(hits, keys_of_groups, low, group_block: tl.constexpr):
    """Write down the groups whose best key reaches `low`, in order; how many."""
    hit = (keys_of_groups >= low).to(tl.int32)
    tl.debug_barrier()  # an earlier list has been read
    tl.store(hits + tl.cumsum(hit, 0) - hit, tl.arange(0, group_block), hit > 0)
    tl.debug_barrier()
    return tl.sum(hit, 0)


@triton.jit
def _tile(logits, hits, start, num_hits, width: tl.constexpr, group: tl.constexpr, block: tl.constexpr):
    """(keys, logits, ids, whether real) of the listed groups from `start` on, ids ascending."""
    i = tl.arange(0, block)
    listed = start + i // group < num_hits
    column = tl.load(hits + start + i // group, mask=listed, other=0) * group + i % group
    real = listed & (column < width)
    x = tl.load(logits + column, mask=real, other=float("-inf"))
    return key_of(x), x, column, real


@triton.jit
def _is_left(keys, column, last_key, last):
    """Tells whether an earlier cut left them."""
    return (keys > last_key) | ((keys == last_key) & (column <= last))


@triton.jit
def _sums_of_row(
    logits, hits, num_hits, pivots, last_key, last, counting, best, slope,
    width: tl.constexpr, group: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """`weights_from` over the listed groups of the row."""
    sums = tl.zeros([PIVOTS], tl.float32)
    for start in range(0, num_hits, block // group):
        keys, x, column, real = _tile(logits, hits, start, num_hits, width, group, block)
        weights = tl.where(counting, 1.0, tl.exp2((x - best) * slope))
        weights = tl.where(real & _is_left(keys, column, last_key, last), weights, 0.0)
        sums += weights_from(keys, weights, pivots)
    return sums


@triton.jit
def _collect(
    logits, hits, num_hits, found, low, high, first, last_key, last,
    width: tl.constexpr, group: tl.constexpr, block: tl.constexpr, capacity: tl.constexpr,
):  # fmt: skip
    """Write down the ids of tokens with keys in [low, high), from number `first` on and as far as there is
    room; how many there are."""
    count = 0
    tl.debug_barrier()
    for start in range(0, num_hits, block // group):
        keys, _, column, real = _tile(logits, hits, start, num_hits, width, group, block)
        chosen = real & _is_left(keys, column, last_key, last) & (keys >= low) & (keys < high)
        chosen = chosen.to(tl.int32)
        place = count + tl.cumsum(chosen, 0) - chosen - first
        tl.store(found + place, column, (chosen > 0) & (place >= 0) & (place < capacity))
        count += tl.sum(chosen, 0)
    tl.debug_barrier()
    return count


@triton.jit
def _ties_to_take(key, above, target, counting, best, slope):
    """float32: how many tokens with the key of the cut it takes to reach the target; one at least."""
    each = tl.where(counting, 1.0, tl.exp2((value_of(key.to(tl.int32)) - best) * slope))
    return tl.maximum(tl.ceil((target - above) / each), 1.0)


@triton.jit
def _cut_among(
    logits, found, count, low, high, above, target, p, is_whole, last_key, last, counting, best, slope,
    size: tl.constexpr, num_pivots: tl.constexpr,
):  # fmt: skip
    """(key, id) of the cut, one of the listed tokens. `is_whole`: the target is p times their sum."""
    i = tl.arange(0, size)
    column = tl.load(found + i, mask=i < count, other=0)
    x = tl.load(logits + column, mask=i < count, other=float("-inf"))
    keys = key_of(x)
    in_range = (i < count) & _is_left(keys, column, last_key, last) & (keys >= low) & (keys < high)
    weights = tl.where(in_range, tl.where(counting, 1.0, tl.exp2((x - best) * slope)), 0.0)
    if is_whole:
        target = p * tl.sum(weights, 0)
    low, high, over = search(keys, weights, low, high, target - above, 1, num_pivots)
    nth = _ties_to_take(low, above + over, target, counting, best, slope)
    tied = (in_range & (keys == low)).to(tl.int32)
    within = (tied > 0) & (tl.cumsum(tied, 0) <= nth)
    return low.to(tl.int32), tl.max(tl.where(within, column, 0), 0)


@triton.jit
def settle(
    logits, row, heat, k, p, share, by_count, by_mass, best, worst, mass, first_target, is_wide,
    group_best, ranges, range_sums, counts, segments, hits, found, num_groups, num_blocks, num_rows,
    last_pass: tl.constexpr, width: tl.constexpr, block: tl.constexpr, pivot_block: tl.constexpr,
    group: tl.constexpr, segment: tl.constexpr, few: tl.constexpr, capacity: tl.constexpr,
    group_block: tl.constexpr, parts_block: tl.constexpr,
):  # fmt: skip
    """(logit, id) of the last token that the filters leave of a row."""
    hits += row * num_groups
    found += row * capacity
    last = width - 1
    slope = LOG2_E / heat
    above_best = key_of(best).to(tl.int64) + 1
    groups = tl.arange(0, group_block)
    is_group = groups < num_groups
    best_of_groups = tl.load(group_best + row * num_groups + groups, mask=is_group, other=float("-inf"))
    keys_of_groups = tl.where(is_group, key_of(best_of_groups), -2147483648)

    # The cut so far, and how many ids are listed in `found`: all from the cut on, if it is `complete`.
    last_key = tl.full([], LOWEST_KEY, tl.int32)
    count, complete = 0, False
    for stage in range(2):
        counting = stage == 0
        if (counting & by_count) | ((stage == 1) & by_mass):
            target = first_target
            low, high, above = last_key.to(tl.int64), above_best, tl.full([], 0.0, tl.float32)
            is_whole, is_listed, is_weighed = complete, complete, True
            if counting | (by_count == 0):
                if is_wide:
                    place = last_pass * num_rows + row
                    low = tl.load(ranges + 2 * place).to(tl.int64)
                    high = tl.load(ranges + 2 * place + 1).to(tl.int64)
                    above = tl.load(range_sums + place)
                    count = take_segments(
                        row, counts, segments, found, num_blocks, width, parts_block, segment, capacity
                    )
                    is_listed = count <= capacity
                else:
                    weights = tl.where(counting, 1.0, tl.exp2((best_of_groups - best) * slope))
                    weights = tl.where(is_group, weights, 0.0)
                    if tl.sum(weights, 0) >= target:
                        least = tl.min(tl.where(is_group, keys_of_groups.to(tl.int64), high), 0)
                        # Somewhat too low is good enough for a bound.
                        low, _, _ = search(keys_of_groups, weights, least, high, target, 1 << 17, PIVOTS)
            else:
                # Unless the tokens that top-k left are all in the list, a pass adds up their weights first.
                is_weighed = complete

            # The number of the token of the cut, where more tokens than there is room for have its key.
            nth = tl.full([], -1, tl.int32)
            if is_listed == 0:
                lowest = lowest_of(best, worst, heat, p, mass, counting, width)
                rounds = 0
                # Everything is too much to begin with.
                count = capacity + 1
                going = True
                while going:
                    num_hits = list_groups(hits, keys_of_groups, low, group_block)
                    is_tied = (high - low <= 1) | (rounds >= MOST_ROUNDS)
                    is_less = is_tied | (rounds > 0) | (low > LOWEST_KEY) | (width <= capacity)
                    if is_weighed & is_less:
                        count = _collect(
                            logits, hits, num_hits, found, low, high, tl.maximum(nth, 0), last_key, last,
                            width, group, block, capacity,
                        )  # fmt: skip
                    going = (count > capacity) & (nth < 0)
                    if going & is_weighed & is_tied:
                        ties = _ties_to_take(low, above, target, counting, best, slope)
                        nth = tl.minimum(ties, count.to(tl.float32)).to(tl.int32) - 1
                        high = low + 1
                    elif going:
                        pivots = even_keys(low, high, PIVOTS)
                        if rounds < _VALUE_ROUNDS:
                            pivots = even_values(low, high, lowest, PIVOTS)
                        if is_weighed == 0:
                            pivots = tl.full([PIVOTS], LOWEST_KEY, tl.int32)
                        sums = _sums_of_row(
                            logits, hits, num_hits, pivots, last_key, last, counting, best, slope,
                            width, group, pivot_block,
                        )  # fmt: skip
                        if is_weighed:
                            low, high, above = narrowed(low, high, above, pivots, sums, target)
                            rounds += 1
                        else:
                            target = p * tl.max(sums, 0)
                            is_weighed = True
            complete = (high == above_best) & (count <= capacity)

            if nth >= 0:
                last_key, last = low.to(tl.int32), tl.load(found)
            elif count <= few:
                last_key, last = _cut_among(
                    logits, found, count, low, high, above, target, p, is_whole, last_key, last, counting,
                    best, slope, few, _PIVOTS_OF_FEW,
                )  # fmt: skip
            else:
                last_key, last = _cut_among(
                    logits, found, count, low, high, above, target, p, is_whole, last_key, last, counting,
                    best, slope, capacity, PIVOTS,
                )  # fmt: skip
    value = value_of(last_key)
    floor = best + heat * tl.log(share)
    if (share > 0.0) & (floor > value):
        value, last = floor, width - 1
    return value, last
