# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""A token drawn before anything is cut off: if the filters leave it, it is the one.

It has the best value of all tokens, noise included, and so of any part of them that it belongs to. Whether it
stays is known from what is before it in the order from likely to unlikely: under top-p it stays in about
`top_p` of all draws, and then nobody has to look for the cut.
"""

import triton
import triton.language as tl

from ..triton_best import token_of_row


@triton.jit
def candidate_of(row, logits, drawn, drawn_at, num_blocks, width: tl.constexpr, parts_block: tl.constexpr):
    """(its logit, its id); `logits` are those of the row."""
    token = token_of_row(drawn, drawn_at, row, num_blocks, width, parts_block)
    return tl.load(logits + token), token


@triton.jit
def is_kept(
    row, logits, drawn, drawn_at, before, best, heat, share, by_count, by_mass, target, num_blocks,
    width: tl.constexpr, parts_block: tl.constexpr,
):  # fmt: skip
    """Whether the filters leave the candidate; never said of top-k and top-p together.

    `before` [rows, blocks]: the weights of tokens before it, of a row with top-k or top-p.
    """
    x, _ = candidate_of(row, logits, drawn, drawn_at, num_blocks, width, parts_block)
    kept = (share <= 0.0) | (x >= best + heat * tl.log(share))
    if by_count | by_mass:
        parts = tl.arange(0, parts_block)
        sums = tl.load(before + row * num_blocks + parts, mask=parts < num_blocks, other=0.0)
        kept = kept & (tl.sum(sums, 0) < target) & (by_count != by_mass)
    return kept
