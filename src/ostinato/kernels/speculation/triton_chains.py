# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""The kernels before a draft's passes, and the best token of its logits; see `chains`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..custom_op import custom_op
from ..dependent_launch import wait_for_previous
from ..host_sizes import cdiv, next_power_of_2
from ..sampling.triton_draw import joined_block, token_of_row

_BLOCK = 128


@triton.jit(
    do_not_specialize=["num_rows", "width", "offset", "num_drafts", "num_features"],
    do_not_specialize_on_alignment=["rows", "lengths", "last_tokens", "drafts", "base"],
)
def _chain_start(
    rows,
    lengths,
    last_tokens,
    drafts,
    base,
    input_ids,
    positions,
    token_rows,
    seq_lens,
    query_starts,
    query_lens,
    features,
    ends,
    num_rows,
    width,
    offset,
    drafts_stride,
    num_drafts,
    num_features,
    block: tl.constexpr,
):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < num_rows * width
    request, step = at // width, at % width
    row = tl.load(rows + request, inside, other=0).to(tl.int64)
    is_real = inside & (row != 0)
    length = tl.load(lengths + row, is_real, other=0)
    first = tl.load(base + row, is_real, other=0)
    count = tl.minimum(tl.maximum(length - first, 1), width)
    is_used = is_real & (step < count)
    position = length - count + 1 + step
    behind = tl.minimum(tl.maximum(position - first - 1, 0), num_features - 1)
    is_last = step == count - 1
    place = row * drafts_stride + tl.minimum(behind, num_drafts - 1)
    drafted = tl.load(drafts + place, is_used & (is_last == 0), other=0)
    last = tl.load(last_tokens + row, is_used & is_last, other=0)
    tl.store(input_ids + at, last + drafted, inside)
    tl.store(positions + at, tl.where(is_used, position - offset, 0).to(tl.int64), inside)
    tl.store(token_rows + at, tl.where(is_used, row, 0).to(tl.int32), inside)
    tl.store(features + at, tl.where(is_used, row * num_features + behind, 0), inside)
    is_first = inside & (step == 0)
    tl.store(seq_lens + request, tl.where(is_real, length + 1 - offset, 1), is_first)
    tl.store(query_starts + request, at, is_first)
    tl.store(query_lens + request, tl.where(is_real, count, 0), is_first)
    tl.store(ends + request, tl.where(is_real, at + count - 1, at).to(tl.int64), is_first)


Start = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@custom_op("chain_start", result=lambda rows, width: _start_outputs(rows, width))
def chain_start(
    rows: Tensor,
    width: int,
    offset: int,
    lengths: Tensor,
    last_tokens: Tensor,
    drafts: Tensor,
    base: Tensor,
    num_features: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Custom op of `chains.chain_start`."""
    outputs = _start_outputs(rows, width)
    _chain_start[(cdiv(rows.size(0) * width, _BLOCK),)](
        rows,
        lengths,
        last_tokens,
        drafts,
        base,
        *outputs,
        rows.size(0),
        width,
        offset,
        drafts.stride(0),
        drafts.size(1),
        num_features,
        block=_BLOCK,
        enable_fp_fusion=True,
    )
    return outputs


def _start_outputs(rows: Tensor, width: int) -> Start:
    def empty(count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=rows.device)

    requests, tokens = rows.size(0), rows.size(0) * width
    long, short = torch.int64, torch.int32
    of_tokens = (empty(tokens, long), empty(tokens, long), empty(tokens, short))
    of_requests = (empty(requests, short), empty(requests, short), empty(requests, short))
    return *of_tokens, *of_requests, empty(tokens, long), empty(requests, long)


@triton.jit(do_not_specialize=["num_rows", "ahead"], do_not_specialize_on_alignment=["rows", "lengths"])
def _chain_next(rows, lengths, positions, seq_lens, query_lens, num_rows, ahead, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < num_rows
    row = tl.load(rows + at, inside, other=0)
    is_real = inside & (row != 0)
    position = tl.where(is_real, tl.load(lengths + row, is_real, other=0) + ahead, 0)
    tl.store(positions + at, position.to(tl.int64), inside)
    tl.store(seq_lens + at, position + 1, inside)
    tl.store(query_lens + at, is_real.to(tl.int32), inside)


@custom_op("chain_next", result=lambda rows: _next_outputs(rows))
def chain_next(rows: Tensor, lengths: Tensor, ahead: int) -> tuple[Tensor, Tensor, Tensor]:
    """Custom op of `chains.chain_next`."""
    outputs = _next_outputs(rows)
    num_rows = rows.size(0)
    _chain_next[(cdiv(num_rows, _BLOCK),)](
        rows, lengths, *outputs, num_rows, ahead, block=_BLOCK, enable_fp_fusion=True
    )
    return outputs


def _next_outputs(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count, device = rows.size(0), rows.device
    positions = torch.empty(count, dtype=torch.int64, device=device)
    seq_lens, query_lens = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
    return positions, seq_lens, query_lens


_LOGITS_BLOCK = 2048


@triton.jit(do_not_specialize=["num_blocks", "row_stride"])
def _best_of_block(
    logits, best, best_at, row_stride, num_blocks, width, block: tl.constexpr, dependent: tl.constexpr
):
    at, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = part * block + tl.arange(0, block)
    wait_for_previous(dependent)
    value = tl.load(logits + at * row_stride + column, column < width, other=float("-inf"))
    found, found_at = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + at * num_blocks + part, found)
    tl.store(best_at + at * num_blocks + part, part * block + found_at)


@triton.jit(
    do_not_specialize=["number", "num_drafts", "num_blocks", "width"],
    do_not_specialize_on_alignment=["rows", "drafts", "offsets"],
)
def _note_best(
    rows,
    best,
    best_at,
    offsets,
    drafts,
    ids,
    number,
    num_drafts,
    num_blocks,
    width,
    has_offsets: tl.constexpr,
    block: tl.constexpr,
    dependent: tl.constexpr,
):
    at = tl.program_id(0)
    row = tl.load(rows + at).to(tl.int64)
    wait_for_previous(dependent)
    token = token_of_row(best, best_at, at, num_blocks, width, block)
    if has_offsets:
        token += tl.load(offsets + token)
    token = tl.where(row != 0, token, 0)
    tl.store(ids + at, token)
    if row != 0:
        tl.store(drafts + row * num_drafts + number, token.to(drafts.dtype.element_ty))


@custom_op(
    "note_best_draft",
    mutates_args=("drafts",),
    result=lambda logits: logits.new_empty(logits.size(0), dtype=torch.int64),
)
def note_best(
    logits: Tensor, rows: Tensor, number: int, drafts: Tensor, target_offsets: Tensor | None
) -> Tensor:
    """Custom op of `chains.note_best`."""
    num_rows, width = logits.shape
    block = min(_LOGITS_BLOCK, next_power_of_2(width))
    num_blocks = cdiv(width, block)
    best = logits.new_empty(num_rows, num_blocks)
    best_at = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    options = dependent_launch.options(logits.device)
    _best_of_block[(num_blocks, num_rows)](
        logits,
        best,
        best_at,
        logits.stride(0),
        num_blocks,
        width,
        block=block,
        enable_fp_fusion=True,
        **options,
    )
    _note_best[(num_rows,)](
        rows,
        best,
        best_at,
        ids if target_offsets is None else target_offsets,
        drafts,
        ids,
        number,
        drafts.stride(0),
        num_blocks,
        width,
        has_offsets=target_offsets is not None,
        block=joined_block(num_blocks),
        num_warps=1,
        enable_fp_fusion=True,
        **options,
    )
    return ids
