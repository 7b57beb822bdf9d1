"""`cuts.find_cuts` on a GPU, without a sort.

| kernel | programs | does |
|---|---|---|
| `survey` | many a row | the best logit of each group of 128 tokens, the sum of all weights |
| `narrow` | many a row, four times | wide rows: brings the range of the cut down, collects it |
| `settle` | one a row | collects what reaches a bound, and finds the cut among that |

The bound: the k best *groups* hold at least k tokens no worse than the k-th of them. So few groups, and few
tokens, have to be looked at again:

    group best      | 3.1 | 7.2 | 0.4 | 6.0 | ...          k = 2: bound 6.0, two groups to look into
    collected       7.2 6.4 6.0, in the order of their ids

Likewise for top-p: if the best tokens of groups reach top_p on their own, so do all tokens from there on.
Where that says little (a flat distribution, a k of many hundreds) a row is *wide*. `narrow` returns at once
for other rows, and everything does for rows without filters.
"""

import torch
import triton
from torch import Tensor

from .. import dependent_launch
from ..custom_op import custom_op
from .triton_narrow import narrow
from .triton_search import PIVOTS
from .triton_settle import settle
from .triton_survey import survey

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


@custom_op("find_cuts")
def find_cuts(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, greedy_below: float
) -> tuple[Tensor, Tensor]:
    """(float32 [n], int32 [n]) of float32 logits [n, vocab]; see `filters.find_cuts`."""
    num_rows, width = logits.shape
    block = max(_GROUP, min(_BLOCK, triton.next_power_of_2(width)))
    num_groups, num_blocks = triton.cdiv(width, _GROUP), triton.cdiv(width, block)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    filters = (temperature, top_k, top_p, min_p)
    of_blocks = (empty(num_rows, num_blocks), empty(num_rows, num_blocks), empty(num_rows, num_blocks))
    group_best = empty(num_rows, num_groups)
    cut, cut_at = empty(num_rows), empty(num_rows, dtype=torch.int32)
    ranges = (empty(_PASSES + 1, num_rows, 2, dtype=torch.int32), empty(_PASSES + 1, num_rows))
    collected = (
        empty(num_rows, num_blocks, dtype=torch.int32),
        empty(num_rows, num_blocks, _SEGMENT, dtype=torch.int32),
    )
    blocks_each = max(1, min(_MOST_BLOCKS, num_rows * num_blocks // _PROGRAMS_WANTED))
    sums = empty(_PASSES, num_rows, num_blocks, PIVOTS.value)
    hits = empty(num_rows, num_groups, dtype=torch.int32)
    found = empty(num_rows, _CAPACITY, dtype=torch.int32)

    sizes = (logits.stride(0), num_groups, num_blocks)
    constants = {"width": width, "greedy_below": greedy_below, "enable_fp_fusion": True}
    constants |= dependent_launch.options(logits.device)
    survey[(num_blocks, num_rows)](
        logits, *filters, group_best, *of_blocks, *sizes, **constants, group=_GROUP, block=block, num_warps=8
    )
    constants |= {"segment": _SEGMENT, "capacity": _CAPACITY}
    constants["parts_block"] = max(16, triton.next_power_of_2(num_blocks))
    for number in range(_PASSES + 1):
        narrow[(triton.cdiv(num_blocks, blocks_each), num_rows)](
            logits,
            *filters,
            *of_blocks,
            *ranges,
            sums,
            *collected,
            *sizes,
            num_rows,
            blocks_each,
            number,
            is_last=number == _PASSES,
            **constants,
            block=block,
            num_warps=8,
        )
    settle[(num_rows,)](
        logits,
        *filters,
        *of_blocks,
        group_best,
        *ranges,
        *collected,
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
        group_block=max(16, triton.next_power_of_2(num_groups)),
        num_warps=8,
    )
    return cut, cut_at


@find_cuts.register_fake
def _(logits: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    num_rows = logits.size(0)
    return logits.new_empty(num_rows), logits.new_empty(num_rows, dtype=torch.int32)
