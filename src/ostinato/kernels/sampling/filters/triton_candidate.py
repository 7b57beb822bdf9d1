# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""A token drawn before anything is cut off: if the filters leave it, it is the one.

It has the best value of all tokens, noise included, and so of any part of them that it belongs to. Whether it
stays is known from what is before it in the order from likely to unlikely: under top-p it stays in about
`top_p` of all draws, and then nobody has to look for the cut. What is found out of a row is its verdict.
"""

import triton
import triton.language as tl
from torch import Tensor

from ... import dependent_launch
from ...dependent_launch import wait_for_previous
from ..triton_draw import token_of_row
from .triton_cuts import Surveyed, Verdicts, judging_constants
from .triton_search import key_of
from .triton_survey import LOG2_E, best_of, facts_of, filters_of

KEPT = tl.constexpr(0)
"""The filters leave the candidate."""
NARROW = tl.constexpr(1)
"""They do not, or that is not known; few tokens have to be looked at for the cut."""
WIDE = tl.constexpr(2)
"""Likewise, but many tokens."""


@triton.jit
def block_to_judge(logits, row, part, by_count, by_mass, width: tl.constexpr, block: tl.constexpr):
    """Logits of a block, as far as `note_before` needs them; ask for them early."""
    column = part * block + tl.arange(0, block)
    limit = tl.where(by_count | by_mass, width, 0)
    return tl.load(logits + row * width + column, mask=column < limit, other=float("-inf"))


@triton.jit
def note_before(
    x, logits, row, part, token, heat, by_count, by_mass, block_best, before, num_blocks,
    width: tl.constexpr, block: tl.constexpr, parts_block: tl.constexpr,
):  # fmt: skip
    """Leave in `before` [rows, blocks] the weights of a block's tokens that are before the candidate."""
    if by_count | by_mass:
        column = part * block + tl.arange(0, block)
        drawn_key = key_of(tl.load(logits + row * width + token))
        best, keys = best_of(row, block_best, num_blocks, parts_block), key_of(x)
        weights = tl.where(by_count, 1.0, tl.exp2((x - best) * (LOG2_E / heat)))
        is_before = (keys > drawn_key) | ((keys == drawn_key) & (column < token))
        weights = tl.where(is_before & (column < width), weights, 0.0)
        tl.store(before + row * num_blocks + part, tl.sum(weights, 0))


@triton.jit
def verdict_of(
    logits, row, token, before, heat, k, p, share, by_count, by_mass, block_best, block_sum, block_lead,
    num_groups, num_blocks, width: tl.constexpr, capacity: tl.constexpr, parts_block: tl.constexpr,
):  # fmt: skip
    """Returns the verdict on a candidate; never `KEPT` with top-k and top-p together."""
    x = tl.load(logits + row * width + token)
    best, _, _, target, is_wide = facts_of(
        row, heat, k, p, by_count, by_mass, block_best, block_sum, block_lead, num_groups, num_blocks,
        width, capacity, parts_block,
    )  # fmt: skip
    kept = (share <= 0.0) | (x >= best + heat * tl.log(share))
    if by_count | by_mass:
        parts = tl.arange(0, parts_block)
        sums = tl.load(before + row * num_blocks + parts, mask=parts < num_blocks, other=0.0)
        kept = kept & (tl.sum(sums, 0) < target) & (by_count != by_mass)
    return tl.where(kept, KEPT, tl.where(is_wide, WIDE, NARROW))


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _judge(
    logits,
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    block_best,
    block_sum,
    block_lead,
    drawn,
    drawn_at,
    before,
    verdicts,
    arrived,
    num_groups,
    num_blocks,
    width: tl.constexpr,
    block: tl.constexpr,
    capacity: tl.constexpr,
    parts_block: tl.constexpr,
    greedy_below: tl.constexpr,
    dependent: tl.constexpr,
):
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    heat, k, p, share, by_count, by_mass, any_filter = filters_of(
        rows, row, temperature, top_k, top_p, min_p, width, greedy_below
    )
    wait_for_previous(dependent)
    if any_filter:
        x = block_to_judge(logits, row, part, by_count, by_mass, width, block)
        token = token_of_row(drawn, drawn_at, row, num_blocks, width, parts_block)
        note_before(
            x, logits, row, part, token, heat, by_count, by_mass, block_best, before, num_blocks,
            width, block, parts_block,
        )  # fmt: skip
        tl.debug_barrier()  # every thread has stored what it found
        if tl.atomic_add(arrived + 2 * row, 1) == num_blocks - 1:
            verdict = verdict_of(
                logits, row, token, before, heat, k, p, share, by_count, by_mass,
                block_best, block_sum, block_lead, num_groups, num_blocks, width, capacity, parts_block,
            )  # fmt: skip
            tl.store(verdicts + row, verdict)
            tl.store(arrived + 2 * row, 0)


def judge(
    logits: Tensor,
    rows: Tensor,
    filters: tuple[Tensor, Tensor, Tensor, Tensor],
    surveyed: Surveyed,
    drawn: tuple[Tensor, Tensor],
    verdicts: Verdicts,
    arrived: Tensor,
) -> None:
    """Find the verdicts of rows whose tokens are not returned; else `triton_amend` does it on its way.

    `logits` float32 [n, vocab], `rows` int32 [n]: the request row of each, which `filters` (temperature,
    top-k, top-p, min-p) are by. `drawn`, `arrived`: as in `Drawn`.
    """
    (num_rows, width), num_blocks = logits.shape, drawn[0].size(1)
    _judge[(num_blocks, num_rows)](
        logits,
        rows,
        *filters,
        *surveyed[1:],
        *drawn,
        *verdicts,
        arrived,
        surveyed.group_best.size(1),
        num_blocks,
        **judging_constants(width),
        enable_fp_fusion=True,
        **dependent_launch.options(logits.device),
    )
