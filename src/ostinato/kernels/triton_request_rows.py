# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""`request_rows.begin_decode` as one kernel: it stands at the head of every decode step."""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    num_rows,
    block: tl.constexpr,
):
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


@torch.library.custom_op("ostinato::begin_decode", mutates_args=("lengths",))
def begin_decode(rows: Tensor, lengths: Tensor, last_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Custom op of `request_rows.begin_decode`."""
    outputs = _outputs(rows)
    num_rows = rows.size(0)
    _begin_decode[(triton.cdiv(num_rows, _BLOCK),)](
        rows, lengths, last_tokens, *outputs, num_rows, block=_BLOCK
    )
    return outputs


@begin_decode.register_fake
def _(rows: Tensor, lengths: Tensor, last_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _outputs(rows)


def _outputs(rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    int64 = torch.empty(2, rows.size(0), dtype=torch.int64, device=rows.device)
    int32 = torch.empty(2, rows.size(0), dtype=torch.int32, device=rows.device)
    return int64[0], int64[1], int32[0], int32[1]
