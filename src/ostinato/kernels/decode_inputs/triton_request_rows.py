# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""The kernel at the head of every decode step; see `request_rows`."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from ..custom_op import custom_op
from ..host_sizes import cdiv

_BLOCK = 128


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


@custom_op("begin_decode", mutates_args=("lengths", "began"), result=lambda rows: _outputs(rows))
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


def _outputs(rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # Four tensors: outputs of a custom op must not share memory.
    int64 = [torch.empty(rows.size(0), dtype=torch.int64, device=rows.device) for _ in range(2)]
    int32 = [torch.empty(rows.size(0), dtype=torch.int32, device=rows.device) for _ in range(2)]
    return int64[0], int64[1], int32[0], int32[1]


@triton.jit
def _note_time(began):
    tl.store(began, globaltimer())


@custom_op("note_time", mutates_args=("began",))
def note_time(began: Tensor) -> None:
    """Custom op of `request_rows.note_time`."""
    _note_time[(1,)](began, num_warps=1, enable_fp_fusion=True)
