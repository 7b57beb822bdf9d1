# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""The kernel at the end of every step: tokens to their rows and, in a line, to the host."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from .. import dependent_launch
from ..custom_op import custom_op
from ..dependent_launch import wait_for_previous
from ..host_sizes import cdiv
from .token_lines import LINE_HEAD
from .triton_draw import best_of_rows, joined_block

_ROWS_BLOCK = 16
"""Rows that a CTA returns: up to as many need no count of CTAs."""


@triton.jit(
    do_not_specialize=["num_rows", "num_blocks", "line_length", "num_lines", "width"],
    do_not_specialize_on_alignment=["rows", "ring", "last_tokens", "counts"],
)
def _return_tokens(
    rows,
    values,
    tokens,
    last_tokens,
    ring,
    counts,
    began,
    num_rows,
    num_blocks,
    line_length,
    num_lines,
    width,
    head: tl.constexpr,
    rows_block: tl.constexpr,
    block: tl.constexpr,
    timed: tl.constexpr,
    dependent: tl.constexpr,
):
    at = tl.program_id(0) * rows_block + tl.arange(0, rows_block)
    inside = at < num_rows
    row = tl.load(rows + at, inside, other=0)
    wait_for_previous(dependent)
    step = tl.load(counts)
    token = best_of_rows(values, tokens, at, inside, num_blocks, width, block)
    line = ring + (step % num_lines) * line_length
    tl.store(last_tokens + row, token, inside & (row != 0))
    tl.store(line + head + at, token, inside)
    # The CTA that ends last moves the count on: by then every thread of all others has read it.
    tl.debug_barrier()
    num_ended = tl.program_id(0).to(tl.int64)
    if tl.num_programs(0) > 1:
        num_ended = tl.atomic_add(counts + 1, 1)
    if num_ended == tl.num_programs(0) - 1:
        tl.store(line, step)
        tl.store(line + 3, 0)  # not amended yet
        if timed:
            tl.store(line + 1, tl.load(began))
            tl.store(line + 2, globaltimer())
        tl.store(counts, step + 1)
        tl.store(counts + 1, 0)


@custom_op("return_best", mutates_args=("last_tokens", "ring", "counts"))
def return_best(
    rows: Tensor,
    values: Tensor,
    tokens: Tensor,
    width: int,
    last_tokens: Tensor,
    ring: Tensor,
    counts: Tensor,
    began: Tensor,
) -> None:
    """Return what has the largest value in each row of `tokens` [R, blocks]; the others are `TokenLines`."""
    _return_tokens[(cdiv(rows.size(0), _ROWS_BLOCK),)](
        rows,
        values,
        tokens,
        last_tokens,
        ring,
        counts,
        began,
        rows.size(0),
        values.size(1),
        ring.size(1),
        ring.size(0),
        width,
        head=LINE_HEAD,
        rows_block=_ROWS_BLOCK,
        block=joined_block(values.size(1)),
        timed=rows.is_cuda,
        enable_fp_fusion=True,
        **dependent_launch.options(rows.device),
    )
