"""Where top-k, top-p and min-p cut rows (`cuts`) on a GPU, without a sort.

| kernel | programs | does |
|---|---|---|
| `triton_adjusted` | many a row | makes logits and a draw; the best of groups of 128, the sum of weights |
| `narrow` | many a row, four times | first: does that draw stay? Wide rows: narrows the range of the cut |
| `settle` | one a row | collects what reaches a bound, and finds the cut among that |

The bound: the k best *groups* hold at least k tokens no worse than the k-th of them. So few groups, and few
tokens, have to be looked at again:

    group best      | 3.1 | 7.2 | 0.4 | 6.0 | ...          k = 2: bound 6.0, two groups to look into
    collected       7.2 6.4 6.0, in the order of their ids

Likewise for top-p: if the best tokens of groups reach top_p on their own, so do all tokens from there on.
Where that says little (a flat distribution, a k of many hundreds) a row is *wide*. After the first pass
`narrow` returns at once for other rows, and everything does for rows without filters and those whose draw
stays (`triton_candidate`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ... import dependent_launch
from ...constants import GREEDY_BELOW
from ...host_sizes import cdiv, next_power_of_2
from ..triton_best import joined_block
from .triton_narrow import narrow
from .triton_search import PIVOTS
from .triton_settle import settle

_BLOCK = 4096
_GROUP = 128
_CAPACITY = 2048
"""Tokens that a program of `settle` compares in registers."""
_FEW = 256
"""So few that it takes a shorter way."""
_TILE = 4096
"""Tokens of a row that it looks at at a time; beside pivots half as many."""
_SEGMENT = 256
"""Tokens of a block that the last pass of `narrow` may collect."""
_PASSES = 3
_PROGRAMS_WANTED, _MOST_BLOCKS = 512, 8
"""Of `narrow`: so many programs fill a GPU, and each has much to find out before its first block."""

_REGISTERS, _REGISTERS_OF_LAST = 80, 128
"""Of a thread of `narrow`: it mostly returns at once, and has to find room beside other kernels."""


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
        return cls(*(torch.empty(num_rows, size, device=device) for size in sizes))


def block_of(width: int) -> int:
    """Tokens that a program looks at; also how `drawn` is cut."""
    return max(_GROUP, min(_BLOCK, next_power_of_2(width)))


def group_of() -> int:
    """Tokens of a group."""
    return _GROUP


def find_cuts(
    logits: Tensor,
    rows: Tensor,
    filters: tuple[Tensor, Tensor, Tensor, Tensor],
    surveyed: Surveyed,
    drawn: tuple[Tensor, Tensor],
    arrived: Tensor,
) -> tuple[Tensor, Tensor]:
    """(float32 [n], int32 [n]) of float32 logits [n, vocab], as `cuts.reference` returns them.

    `rows` int32 [n]: the request row of each, which `filters` (temperature, top-k, top-p, min-p) are by.
    `drawn` float32 and int32 [n, blocks]: the best value with noise in each block, and its token. Where the
    best of all is left by the filters, or there is none, the row is cut at +inf: it needs no other draw.
    `arrived` int32 [n]: zeros, and is so again.
    """
    num_rows, width = logits.shape
    block = block_of(width)
    num_groups, num_blocks = cdiv(width, _GROUP), cdiv(width, block)
    group_best, *of_blocks = surveyed

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    cut, cut_at = empty(num_rows), empty(num_rows, dtype=torch.int32)
    ranges = (empty(_PASSES + 1, num_rows, 2, dtype=torch.int32), empty(_PASSES + 1, num_rows))
    collected = (
        empty(num_rows, num_blocks, dtype=torch.int32),
        empty(num_rows, num_blocks, _SEGMENT, dtype=torch.int32),
    )
    verdicts = empty(num_rows, dtype=torch.int32)
    candidates = (*drawn, empty(num_rows, num_blocks), verdicts, arrived)
    blocks_each = max(1, min(_MOST_BLOCKS, num_rows * num_blocks // _PROGRAMS_WANTED))
    sums = empty(_PASSES, num_rows, num_blocks, PIVOTS.value)
    hits = empty(num_rows, num_groups, dtype=torch.int32)
    found = empty(num_rows, _CAPACITY, dtype=torch.int32)

    sizes = (logits.stride(0), num_groups, num_blocks)
    constants = {"width": width, "greedy_below": GREEDY_BELOW, "enable_fp_fusion": True}
    constants |= {"segment": _SEGMENT, "capacity": _CAPACITY, "parts_block": joined_block(num_blocks)}
    constants |= dependent_launch.options(logits.device)
    for number in range(_PASSES + 1):
        narrow[(cdiv(num_blocks, blocks_each), num_rows)](
            logits,
            rows,
            *filters,
            *of_blocks,
            *ranges,
            sums,
            *collected,
            *candidates,
            *sizes,
            num_rows,
            blocks_each,
            number,
            is_last=number == _PASSES,
            **constants,
            block=block,
            num_warps=8,
            maxnreg=_REGISTERS_OF_LAST if number == _PASSES else _REGISTERS,
        )
    settle[(num_rows,)](
        logits,
        rows,
        *filters,
        *of_blocks,
        group_best,
        *ranges,
        *collected,
        verdicts,
        hits,
        found,
        cut,
        cut_at,
        *sizes,
        num_rows,
        last_pass=_PASSES,
        **constants,
        block=max(_GROUP, min(_TILE, block)),
        pivot_block=max(_GROUP, min(_TILE, block) // 2),
        group=_GROUP,
        few=_FEW,
        group_block=max(16, next_power_of_2(num_groups)),
        num_warps=8,
    )
    return cut, cut_at
