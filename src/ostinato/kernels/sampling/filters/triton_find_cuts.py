# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""The kernel that finds cuts, of rows whose filters cut off what was drawn.

Most steps have no such row, and then this kernel looks at the verdicts and returns. All passes over a row are
one kernel: see Note [CTAs that wait for each other].

Drawing again is left to the next one, `triton_redraw`. One kernel for both is a launch less, but takes longer
to compile than the two together, which are compiled at the same time: a cold start would wait for it.
"""

import triton
import triton.language as tl
from torch import Tensor

from ... import dependent_launch
from ...dependent_launch import wait_for_previous
from ...gpu import gpu_of
from ...host_sizes import cdiv
from .triton_candidate import KEPT, NARROW, WIDE
from .triton_cuts import PASSES, Cuts, Surveyed, cutting_constants
from .triton_meeting import MEETING_REGISTERS, blocks_each_of, meet
from .triton_narrow import narrow
from .triton_search import lowest_of
from .triton_settle import settle
from .triton_survey import facts_of, filters_of


@triton.jit(do_not_specialize=["num_rows", "blocks_each"], do_not_specialize_on_alignment=["rows"])
def _find_cuts(
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    adjusted,
    group_best,
    block_best,
    block_sum,
    block_lead,
    arrived,
    verdicts,
    ranges,
    range_sums,
    sums,
    segment_counts,
    segments,
    hits,
    found,
    cut,
    cut_at,
    num_groups,
    num_blocks,
    num_rows,
    blocks_each,
    begin: tl.constexpr,
    end: tl.constexpr,
    meets: tl.constexpr,
    passes: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    pivot_tile: tl.constexpr,
    group: tl.constexpr,
    segment: tl.constexpr,
    few: tl.constexpr,
    capacity: tl.constexpr,
    group_block: tl.constexpr,
    parts_block: tl.constexpr,
    greedy_below: tl.constexpr,
    dependent: tl.constexpr,
):
    """Runs the passes of `narrow` and then `settle`: from number `begin` on to before `end`."""
    at, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    heat, k, p, share, by_count, by_mass, is_filtered = filters_of(
        rows, at, temperature, top_k, top_p, min_p, width, greedy_below
    )
    wait_for_previous(dependent)
    verdict = KEPT
    if is_filtered:
        verdict = tl.load(verdicts + at)
    if (verdict == WIDE) | ((verdict == NARROW) & (part == 0)):
        lines, met, goal = adjusted + at * width, arrived + 2 * at + 1, tl.num_programs(0)
        best, worst, mass, target, is_wide = facts_of(
            at, heat, k, p, by_count, by_mass, block_best, block_sum, block_lead, num_groups, num_blocks,
            width, capacity, parts_block,
        )  # fmt: skip
        if verdict == WIDE:
            first, behind = part * blocks_each, tl.minimum((part + 1) * blocks_each, num_blocks)
            lowest = lowest_of(best, worst, heat, p, mass, by_count, width)
            for number in range(begin, min(end, passes + 1)):
                narrow(
                    lines, at, number, first, behind, num_rows, num_blocks, ranges, range_sums, sums,
                    segment_counts, segments, best, lowest, heat, by_count, target, number == passes,
                    width, block, segment, parts_block,
                )  # fmt: skip
                if meets:
                    meet(met, goal)
                goal += tl.num_programs(0)
        if end > passes + 1 and part == 0:
            value, last = settle(
                lines, at, heat, k, p, share, by_count, by_mass, best, worst, mass, target, is_wide,
                group_best, ranges, range_sums, segment_counts, segments, hits, found,
                num_groups, num_blocks, num_rows,
                passes, width, tile, pivot_tile, group, segment, few, capacity, group_block, parts_block,
            )  # fmt: skip
            tl.store(cut + at, value)
            tl.store(cut_at + at, last)


def find_cuts(
    logits: Tensor,
    rows: Tensor,
    filters: tuple[Tensor, Tensor, Tensor, Tensor],
    surveyed: Surveyed,
    verdicts: Tensor,
    arrived: Tensor,
    cuts: Cuts,
) -> None:
    """Leave in `cuts` where rows are cut whose verdict is not `KEPT`.

    The arguments are those of `triton_candidate.judge`. `verdicts`: what it found, or `triton_amend`.
    """
    (num_rows, width), num_blocks = logits.shape, surveyed.block_best.size(1)
    blocks_each = blocks_each_of(num_rows, num_blocks, gpu_of(logits.device))
    meets = not dependent_launch.INTERPRETED
    end = PASSES + 2
    for begin in (0,) if meets else range(end):
        _find_cuts[(cdiv(num_blocks, blocks_each), num_rows)](
            rows,
            *filters,
            logits,
            *surveyed,
            arrived,
            verdicts,
            *cuts,
            surveyed.group_best.size(1),
            num_blocks,
            num_rows,
            blocks_each,
            begin=begin,
            end=end if meets else begin + 1,
            meets=meets,
            maxnreg=MEETING_REGISTERS,
            **cutting_constants(width),
            enable_fp_fusion=True,
            **dependent_launch.options(logits.device),
        )
