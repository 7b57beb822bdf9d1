# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""The kernels before a draft's passes; see `chains`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..custom_op import custom_op
from ..host_sizes import cdiv

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


@custom_op("chain_start")
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


@chain_start.register_fake
def _(rows: Tensor, width: int, *others: object) -> Start:
    return _start_outputs(rows, width)


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


@custom_op("chain_next")
def chain_next(rows: Tensor, lengths: Tensor, ahead: int) -> tuple[Tensor, Tensor, Tensor]:
    """Custom op of `chains.chain_next`."""
    outputs = _next_outputs(rows)
    num_rows = rows.size(0)
    _chain_next[(cdiv(num_rows, _BLOCK),)](
        rows, lengths, *outputs, num_rows, ahead, block=_BLOCK, enable_fp_fusion=True
    )
    return outputs


@chain_next.register_fake
def _(rows: Tensor, lengths: Tensor, ahead: int) -> tuple[Tensor, Tensor, Tensor]:
    return _next_outputs(rows)


def _next_outputs(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count, device = rows.size(0), rows.device
    positions = torch.empty(count, dtype=torch.int64, device=device)
    seq_lens, query_lens = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
    return positions, seq_lens, query_lens
