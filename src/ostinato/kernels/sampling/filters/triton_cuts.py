"""Where top-k, top-p and min-p cut rows (`cuts`) on a GPU, without a sort: sizes, and room for what is found.

| kernel | CTAs | does |
|---|---|---|
| `triton_adjusted` | many a row | makes logits and a draw; the best of groups of 128, the sum of weights |
| `triton_amend` | many a row | does that draw stay? If so, the row is done |
| `triton_find_cuts` | many a row | of the others: where is the cut? |
| `triton_redraw` | many a row | of these: draws again from what the cut leaves |

The cut of a *wide* row (below) is looked for in four passes by all its CTAs, which narrow its range
(`triton_narrow`); then one CTA collects what reaches a bound, and finds it among that (`triton_settle`).

The bound: the k best *groups* hold at least k tokens no worse than the k-th of them. So few groups, and few
tokens, have to be looked at again:

    group best      | 3.1 | 7.2 | 0.4 | 6.0 | ...          k = 2: bound 6.0, two groups to look into
    collected       7.2 6.4 6.0, in the order of their ids

Likewise for top-p: if the best tokens of groups reach top_p on their own, so do all tokens from there on.
Where that says little (a flat distribution, a k of many hundreds) a row is wide.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...constants import GREEDY_BELOW
from ...host_sizes import cdiv, next_power_of_2
from ..triton_draw import joined_block
from .triton_search import PIVOTS

_BLOCK = 4096
_GROUP = 128
_CAPACITY = 2048
"""Tokens that the CTA of `settle` compares in registers."""
_FEW = 256
"""So few that it takes a shorter way."""
_TILE = 4096
"""Tokens of a row that it looks at at a time; beside pivots half as many."""
_SEGMENT = 256
"""Tokens of a block that the last pass of `narrow` may collect."""
PASSES = 3
"""Of `narrow`, before the one that collects."""


class Surveyed(NamedTuple):
    """What the kernel that makes logits [n, vocab] leaves for filters, by `triton_survey.survey_block`."""

    group_best: Tensor
    """float32 [n, groups]: of each group of tokens."""
    block_best: Tensor
    """float32 [n, blocks]."""
    block_sum: Tensor
    """float32 [n, blocks]: weights relative to the block's best."""
    block_lead: Tensor
    """float32 [n, blocks]: of those, what the best of the groups have."""

    @classmethod
    def empty(cls, num_rows: int, width: int, device: torch.device) -> "Surveyed":
        """Room for it."""
        num_groups, num_blocks = cdiv(width, _GROUP), cdiv(width, block_of(width))
        sizes = (num_groups, num_blocks, num_blocks, num_blocks)
        return cls(*(torch.empty(num_rows, size, dtype=torch.float32, device=device) for size in sizes))


class Verdicts(NamedTuple):
    """Whether rows keep the token that was drawn before anything was cut off."""

    before: Tensor
    """float32 [n, blocks]: weights of the tokens before it."""
    verdicts: Tensor
    """int32 [n]: of rows with filters; see `triton_candidate`."""

    @classmethod
    def empty(cls, num_rows: int, width: int, device: torch.device) -> "Verdicts":
        """Room for them."""
        num_blocks = cdiv(width, block_of(width))
        return cls(
            torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device),
            torch.empty(num_rows, dtype=torch.int32, device=device),
        )


class Cuts(NamedTuple):
    """Where rows are cut that do not keep it, and what is found on the way there."""

    ranges: Tensor
    """int32 [passes + 1, n, 2]: keys between which the cut is before each pass of `narrow`."""
    range_sums: Tensor
    """float32 [passes + 1, n]: weights above that."""
    sums: Tensor
    """float32 [passes, n, blocks, pivots]."""
    counts: Tensor
    """int32 [n, blocks]: how many tokens of each block the last pass collected."""
    segments: Tensor
    """int32 [n, blocks, most]: these."""
    hits: Tensor
    """int32 [n, groups]: groups that `settle` looks into."""
    found: Tensor
    """int32 [n, most]: tokens that it collects."""
    value: Tensor
    """float32 [n]: the logit of the last token that stays, as `cuts.reference` has it."""
    last: Tensor
    """int32 [n]: its id."""

    @classmethod
    def empty(cls, num_rows: int, width: int, device: torch.device) -> "Cuts":
        """Room for them."""
        num_groups, num_blocks = cdiv(width, _GROUP), cdiv(width, block_of(width))

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        return cls(
            room(PASSES + 1, num_rows, 2),
            room(PASSES + 1, num_rows, dtype=torch.float32),
            room(PASSES, num_rows, num_blocks, PIVOTS.value, dtype=torch.float32),
            room(num_rows, num_blocks),
            room(num_rows, num_blocks, _SEGMENT),
            room(num_rows, num_groups),
            room(num_rows, _CAPACITY),
            room(num_rows, dtype=torch.float32),
            room(num_rows),
        )


def block_of(width: int) -> int:
    """Tokens that a CTA looks at; also how `drawn` is cut."""
    return max(_GROUP, min(_BLOCK, next_power_of_2(width)))


def group_of() -> int:
    """Tokens of a group."""
    return _GROUP


def block_constants(width: int) -> dict[str, Any]:
    """Returns constants of kernels whose CTAs go through blocks of rows with filters."""
    block = block_of(width)
    return {
        "width": width,
        "block": block,
        "parts_block": joined_block(cdiv(width, block)),
        "greedy_below": GREEDY_BELOW,
        "num_warps": 8,
    }


def judging_constants(width: int) -> dict[str, Any]:
    """Returns constants of kernels that call `triton_candidate.verdict_of`."""
    return block_constants(width) | {"capacity": _CAPACITY}


def cutting_constants(width: int) -> dict[str, Any]:
    """Returns constants of kernels that call `triton_settle.settle`."""
    tile = max(_GROUP, min(_TILE, block_of(width)))
    return judging_constants(width) | {
        "passes": PASSES,
        "segment": _SEGMENT,
        "tile": tile,
        "pivot_tile": max(_GROUP, tile // 2),
        "group": _GROUP,
        "few": _FEW,
        "group_block": max(16, next_power_of_2(cdiv(width, _GROUP))),
    }
