# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""What one look at all logits of a row tells: the best of each group of tokens, and sums of weights.

Rows of logits are numbered as they lie; what their requests ask for is by request row, which `rows` names.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def filters_of(rows, row, temperature, top_k, top_p, min_p, width: tl.constexpr, greedy_below: tl.constexpr):
    """(temperature, k, p, min_p, whether by top-k, by top-p, at all)."""
    asking = tl.load(rows + row)
    heat, k = tl.load(temperature + asking), tl.load(top_k + asking)
    p, share = tl.load(top_p + asking), tl.load(min_p + asking)
    random = (heat >= greedy_below) & (asking != 0)  # padding asks for nothing
    by_count = random & (k > 0) & (k < width)
    by_mass = random & (p < 1.0)
    return heat, k, p, share, by_count, by_mass, by_count | by_mass | (random & (share > 0.0))


@triton.jit
def survey_block(
    x, row, part, heat, group_best, block_best, block_sum, block_lead, num_groups, num_blocks,
    num_here: tl.constexpr,
):  # fmt: skip
    """Of logits [num_here, group], those of a block of a row: the best of each group, and sums of weights."""
    groups = part * num_here + tl.arange(0, num_here)
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
def best_of(row, block_best, num_blocks, parts_block: tl.constexpr):
    """Returns the best logit of a row, as `facts_of` has it."""
    parts = tl.arange(0, parts_block)
    found = tl.load(block_best + row * num_blocks + parts, mask=parts < num_blocks, other=float("-inf"))
    return tl.max(found, 0)
