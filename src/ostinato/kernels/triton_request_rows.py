# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""The kernels at the head and at the end of every decode step; see `request_rows`."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from . import dependent_launch
from .custom_op import custom_op
from .dependent_launch import wait_for_previous
from .host_sizes import cdiv
from .sampling.token_lines import LINE_HEAD
from .sampling.triton_best import best_of_rows, joined_block

_BLOCK = 128
_JOINED = 1
"""Instead of a block: each row has its token already."""
_ROWS_BLOCK = 16
"""Rows that a program returns: up to as many need no count of programs."""


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows"])
def _begin_decode(
    rows,
    lengths,
    last_tokens,
    input_ids,
    positions,
    seq_lens,
    query_lens,
    began,
    num_rows,
    block: tl.constexpr,
    timed: tl.constexpr,
):
    if timed and tl.program_id(0) == 0:
        tl.store(began, globaltimer())
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < num_rows
    row = tl.load(rows + at, inside, other=0)
    length = tl.load(lengths + row, inside, other=0)
    tl.store(input_ids + at, tl.load(last_tokens + row, inside, other=0), inside)
    tl.store(positions + at, length.to(tl.int64), inside)
    tl.store(seq_lens + at, length + 1, inside)
    tl.store(query_lens + at, (row != 0).to(tl.int32), inside)
    # Rows of one step differ, except padding's row 0, which is never written.
    tl.store(lengths + row, length + 1, inside & (row != 0))


@custom_op("begin_decode", mutates_args=("lengths", "began"))
def begin_decode(
    rows: Tensor, lengths: Tensor, last_tokens: Tensor, began: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Custom op of `request_rows.begin_decode`."""
    outputs = _outputs(rows)
    num_rows = rows.size(0)
    _begin_decode[(cdiv(num_rows, _BLOCK),)](
        rows,
        lengths,
        last_tokens,
        *outputs,
        began,
        num_rows,
        block=_BLOCK,
        timed=rows.is_cuda,
        enable_fp_fusion=True,
    )
    return outputs


@begin_decode.register_fake
def _(
    rows: Tensor, lengths: Tensor, last_tokens: Tensor, began: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _outputs(rows)


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
    if block > 1:  # not `_JOINED`
        token = best_of_rows(values, tokens, at, inside, num_blocks, width, block)
    else:
        token = tl.load(tokens + at, inside, other=0)
    line = ring + (step % num_lines) * line_length
    tl.store(last_tokens + row, token, inside & (row != 0))
    tl.store(line + head + at, token, inside)
    # The program that ends last moves the count on: by then every thread of all others has read it.
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


def _launch_return(
    rows: Tensor, values: Tensor, tokens: Tensor, width: int, lines: tuple[Tensor, ...], block: int
) -> None:
    ring = lines[1]
    _return_tokens[(cdiv(rows.size(0), _ROWS_BLOCK),)](
        rows,
        values,
        tokens,
        *lines,
        rows.size(0),
        values.size(-1),
        ring.size(1),
        ring.size(0),
        width,
        head=LINE_HEAD,
        rows_block=_ROWS_BLOCK,
        block=block,
        timed=rows.is_cuda,
        enable_fp_fusion=True,
        **dependent_launch.options(rows.device),
    )


@custom_op("return_tokens", mutates_args=("last_tokens", "ring", "counts"))
def return_tokens(
    rows: Tensor, tokens: Tensor, last_tokens: Tensor, ring: Tensor, counts: Tensor, began: Tensor
) -> None:
    """Custom op of `request_rows.return_tokens`."""
    _launch_return(rows, tokens, tokens, 0, (last_tokens, ring, counts, began), _JOINED)


@return_tokens.register_fake
def _(rows: Tensor, tokens: Tensor, *lines: Tensor) -> None:
    return None


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
    """`return_tokens` of the token that has the largest value in each row of `tokens` [R, blocks]."""
    lines = (last_tokens, ring, counts, began)
    _launch_return(rows, values, tokens, width, lines, joined_block(values.size(1)))


@return_best.register_fake
def _(rows: Tensor, values: Tensor, tokens: Tensor, width: int, *lines: Tensor) -> None:
    return None


def _outputs(rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # Four tensors: outputs of a custom op must not share memory.
    int64 = [torch.empty(rows.size(0), dtype=torch.int64, device=rows.device) for _ in range(2)]
    int32 = [torch.empty(rows.size(0), dtype=torch.int32, device=rows.device) for _ in range(2)]
    return int64[0], int64[1], int32[0], int32[1]
