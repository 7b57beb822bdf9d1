# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""The kernel at the head of a step that verifies drafts; see `verification`."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from ..custom_op import custom_op
from ..host_sizes import cdiv

_BLOCK = 128


@triton.jit(
    do_not_specialize=["num_rows", "q", "num_drafts"],
    do_not_specialize_on_alignment=["rows", "lengths", "last_tokens", "drafts"],
)
def _begin_verify(
    rows,
    lengths,
    last_tokens,
    drafts,
    input_ids,
    positions,
    token_rows,
    seq_lens,
    query_starts,
    query_lens,
    began,
    num_rows,
    q,
    num_drafts,
    block: tl.constexpr,
    timed: tl.constexpr,
):
    if timed and tl.program_id(0) == 0:
        tl.store(began, globaltimer())
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < num_rows * q
    request, step = at // q, at % q
    row = tl.load(rows + request, inside, other=0)
    is_real = inside & (row != 0)
    length = tl.load(lengths + row, is_real, other=0)
    draft = tl.load(drafts + row.to(tl.int64) * num_drafts + step - 1, is_real & (step > 0), other=0)
    last = tl.load(last_tokens + row, is_real & (step == 0), other=0)
    tl.store(input_ids + at, last + draft, inside)
    tl.store(positions + at, tl.where(is_real, length + step, 0).to(tl.int64), inside)
    tl.store(token_rows + at, row, inside)
    is_first = inside & (step == 0)
    tl.store(seq_lens + request, tl.where(is_real, length + q, 1), is_first)
    tl.store(query_starts + request, at, is_first)
    tl.store(query_lens + request, tl.where(is_real, q, 0), is_first)


Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@custom_op("begin_verify", mutates_args=("began",))
def begin_verify(
    rows: Tensor, q: int, lengths: Tensor, last_tokens: Tensor, drafts: Tensor, began: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Custom op of `verification.begin_verify`."""
    outputs = _outputs(rows, q)
    num_rows = rows.size(0)
    _begin_verify[(cdiv(num_rows * q, _BLOCK),)](
        rows,
        lengths,
        last_tokens,
        drafts,
        *outputs,
        rows if began is None else began,
        num_rows,
        q,
        drafts.stride(0),
        block=_BLOCK,
        timed=rows.is_cuda and began is not None,
        enable_fp_fusion=True,
    )
    return outputs


@begin_verify.register_fake
def _(rows: Tensor, q: int, lengths: Tensor, last_tokens: Tensor, drafts: Tensor, began: Tensor) -> Outputs:
    return _outputs(rows, q)


def _outputs(rows: Tensor, q: int) -> Outputs:
    # Six tensors: outputs of a custom op must not share memory.
    count = rows.size(0)
    ids, positions = (torch.empty(count * q, dtype=torch.int64, device=rows.device) for _ in range(2))
    token_rows = torch.empty(count * q, dtype=torch.int32, device=rows.device)
    by_request = [torch.empty(count, dtype=torch.int32, device=rows.device) for _ in range(3)]
    return ids, positions, token_rows, by_request[0], by_request[1], by_request[2]
