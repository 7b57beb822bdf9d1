# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Looking for the key at which weights reach a target, by pivots.

Note [Searching for a cut]
Top-k and top-p ask the same: the largest logit at which the weights of all tokens no smaller reach a target.
Weights are 1 and the target k, or weights are exp((logit - best) / temperature) and the target is top_p of
their sum. Logits are compared as integers of the same order, their keys, so a search ends with one logit, and
the tokens that have it are taken in the order of their ids. Sums are float32 in an order that is always the
same.
"""

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-2139095041)
"""The key of -inf."""
PIVOTS = tl.constexpr(8)
"""Beside many keys; a thread holds its keys beside all pivots."""
MOST_ROUNDS = tl.constexpr(16)
"""Enough for any row: twelve divisions by 7 of a range of 2**32."""


@triton.jit
def key_of(x):
    """An int32 of the same order; both zeros are equal."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """Returns the float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def even_keys(low, high, count: tl.constexpr):
    """Pivots from `low` on that divide the keys below `high` evenly."""
    step = tl.maximum((high - low) // count, 1)
    return tl.minimum(low + step * tl.arange(0, count), high - 1).to(tl.int32)


@triton.jit
def lowest_of(best, worst, heat, p, mass, by_count, width: tl.constexpr):
    """Returns the lowest logit at which the threshold can be; for a count it is a guess."""
    # Tokens less likely than (1 - p) / width sum to less than 1 - p.
    span = heat * tl.log(width / ((1.0 - p) * mass)) + 1e-3
    return best - tl.where(by_count, 4.0 * (best - worst), span)


@triton.jit
def even_values(low, high, lowest, count: tl.constexpr):
    """Pivots that divide the logits of the range evenly; from `lowest` on, where the range has no end."""
    least = value_of(low.to(tl.int32))
    lowest = tl.where(least == float("-inf"), lowest, least)
    highest = value_of((high - 1).to(tl.int32))
    pivots = even_keys(low, high, count)
    if lowest < highest:
        pivots = key_of(lowest + (highest - lowest) / count * tl.arange(0, count))
        pivots = tl.minimum(tl.maximum(pivots, low), high - 1).to(tl.int32)
    return pivots


@triton.jit
def weights_from(keys, weights, pivots):
    """float32 [pivots]: the sum of the weights of keys no smaller than each pivot."""
    # In this orientation a thread holds its keys beside all pivots, and no key has to travel.
    return tl.sum(tl.where(keys[None, :] >= pivots[:, None], weights[None, :], 0.0), 1)


@triton.jit
def narrowed(low, high, above, pivots, sums, target):
    """The range [low, high) of the cut's key, less by what the sums from the pivots on say.

    `above`: the sum from `high` on. That from `low` on reaches the target, whatever rounding says.
    """
    reached = (sums >= target) | (pivots <= low)
    above = tl.max(tl.where(reached, above, sums), 0)
    high = tl.min(tl.where(reached, high, pivots.to(tl.int64)), 0)
    return tl.max(tl.where(reached, pivots.to(tl.int64), low), 0), high, above


@triton.jit
def search(keys, weights, low, high, target, least: tl.constexpr, count: tl.constexpr):
    """`narrowed` until no more than `least` keys are between; see Note [Searching for a cut]."""
    above = tl.full([], 0.0, tl.float32)
    rounds = 0
    while (high - low > least) & (rounds < MOST_ROUNDS):
        pivots = even_keys(low, high, count)
        low, high, above = narrowed(low, high, above, pivots, weights_from(keys, weights, pivots), target)
        rounds += 1
    return low, high, above
