# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""One look at all logits of a row by many programs: the best of each group of tokens, and sums of weights."""

import triton
import triton.language as tl

from ..dependent_launch import wait_for_previous

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def filters_of(row, temperature, top_k, top_p, min_p, width: tl.constexpr, greedy_below: tl.constexpr):
    """(temperature, k, p, min_p, whether by top-k, by top-p, at all)."""
    heat, k = tl.load(temperature + row), tl.load(top_k + row)
    p, share = tl.load(top_p + row), tl.load(min_p + row)
    random = heat >= greedy_below
    by_count = random & (k > 0) & (k < width)
    by_mass = random & (p < 1.0)
    return heat, k, p, share, by_count, by_mass, by_count | by_mass | (random & (share > 0.0))


@triton.jit
def survey(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    group_best,
    block_best,
    block_sum,
    block_lead,
    row_stride,
    num_groups,
    num_blocks,
    width: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    greedy_below: tl.constexpr,
    dependent: tl.constexpr,
):
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    groups = part * (block // group) + tl.arange(0, block // group)
    column = groups[:, None] * group + tl.arange(0, group)[None, :]
    wait_for_previous(dependent)
    heat, _, _, _, _, _, any_filter = filters_of(row, temperature, top_k, top_p, min_p, width, greedy_below)
    if any_filter:
        x = tl.load(logits + row * row_stride + column, mask=column < width, other=float("-inf"))
        best_of_groups = tl.max(x, 1)
        best = tl.max(best_of_groups, 0)
        shift = tl.where(best == float("-inf"), 0.0, best)
        weights = tl.exp2((x - shift) * (LOG2_E / heat))
        tl.store(group_best + row * num_groups + groups, best_of_groups, groups < num_groups)
        tl.store(block_best + row * num_blocks + part, best)
        tl.store(block_sum + row * num_blocks + part, tl.sum(tl.sum(weights, 1), 0))
        lead = tl.sum(tl.exp2((best_of_groups - shift) * (LOG2_E / heat)), 0)
        tl.store(block_lead + row * num_blocks + part, lead)


@triton.jit
def facts_of(
    row, heat, k, p, by_count, by_mass, block_best, block_sum, block_lead, num_groups, num_blocks,
    width: tl.constexpr, capacity: tl.constexpr, parts_block: tl.constexpr,
):  # fmt: skip
    """(best, worst of the blocks' best, sum of weights, target of the first search, whether a wide row)."""
    parts = tl.arange(0, parts_block)
    is_part = parts < num_blocks
    place = row * num_blocks + parts
    part_best = tl.load(block_best + place, mask=is_part, other=float("-inf"))
    part_sum = tl.load(block_sum + place, mask=is_part, other=0.0)
    part_lead = tl.load(block_lead + place, mask=is_part, other=0.0)
    best = tl.max(part_best, 0)
    worst = tl.min(tl.where(part_best > float("-inf"), part_best, best), 0)
    share = tl.where(part_sum > 0.0, tl.exp2((part_best - best) * (LOG2_E / heat)), 0.0)
    mass, lead = tl.sum(part_sum * share, 0), tl.sum(part_lead * share, 0)
    target = tl.where(by_count, k.to(tl.float32), p * mass)
    # The bound of top-p is a good one if groups have little but their best token to offer.
    is_wide = tl.where(by_count, 2 * k > num_groups, by_mass & (target > 2.0 * lead - mass))
    return best, worst, mass, target, is_wide & (width > capacity)


@triton.jit
def may_be_wide(k, by_count, by_mass, num_groups):
    """Whether `facts_of` may find a wide row, as far as its settings tell."""
    return (by_count & (2 * k > num_groups)) | (by_mass & (by_count == 0))
