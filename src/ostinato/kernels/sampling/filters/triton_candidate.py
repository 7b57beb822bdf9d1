# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""A token drawn before anything is cut off: if the filters leave it, it is the one.

It has the best value of all tokens, noise included, and so of any part of them that it belongs to. Whether it
stays is known from what is before it in the order from likely to unlikely: under top-p it stays in about
`top_p` of all draws, and then nobody has to look for the cut. What is found out of a row is its verdict.
"""

import triton
import triton.language as tl

KEPT = tl.constexpr(0)
"""The filters leave the candidate."""
NARROW = tl.constexpr(1)
"""They do not, or that is not known; few tokens have to be looked at for the cut."""
WIDE = tl.constexpr(2)
"""Likewise, but many tokens."""


@triton.jit
def verdict_of(
    x, row, before, best, heat, share, by_count, by_mass, target, is_wide, num_blocks,
    parts_block: tl.constexpr,
):  # fmt: skip
    """Of a candidate with the logit x; never `KEPT` with top-k and top-p together.

    `before` [rows, blocks]: the weights of tokens before it, of a row with top-k or top-p.
    """
    kept = (share <= 0.0) | (x >= best + heat * tl.log(share))
    if by_count | by_mass:
        parts = tl.arange(0, parts_block)
        sums = tl.load(before + row * num_blocks + parts, mask=parts < num_blocks, other=0.0)
        kept = kept & (tl.sum(sums, 0) < target) & (by_count != by_mass)
    return tl.where(kept, KEPT, tl.where(is_wide, WIDE, NARROW))
