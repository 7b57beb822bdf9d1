"""The inputs of a step that verifies drafts: q tokens of each request, read from the rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda.compiled import is_compiling_only


class VerifyInputs(NamedTuple):
    """R requests of q tokens each, one request after another: token i of request r is r * q + i."""

    input_ids: Tensor
    """int64 [R * q]: the last token and the drafts."""
    positions: Tensor
    """int64 [R * q]."""
    token_rows: Tensor
    """int32 [R * q]."""
    seq_lens: Tensor
    """int32 [R]: context length, all q tokens included; 1 for padding."""
    query_starts: Tensor
    """int32 [R]."""
    query_lens: Tensor
    """int32 [R]: q, and 0 for padding."""


def begin_verify(
    rows: Tensor, q: int, lengths: Tensor, last_tokens: Tensor, drafts: Tensor, began: Tensor | None
) -> VerifyInputs:
    """Read the inputs of a step of q tokens from `rows` int32 [R]; nothing is changed, `accept` does that.

    All else by request row, as in `SpecState`. On a GPU the time goes into `began` int64 [1], in nanoseconds
    of the device's own clock; None: a draft before it has noted when the step began.
    """
    if rows.is_cuda:
        from . import triton_verification

        launched = triton_verification.begin_verify(rows, q, lengths, last_tokens, drafts, began)
        if not is_compiling_only():
            return VerifyInputs(*launched)
        # The kernel did not run; but its results are places in tables, which must exist.
    num_requests = rows.size(0)
    is_real = rows != 0
    query_lens = is_real.int() * q
    length = lengths.index_select(0, rows) * is_real
    steps = torch.arange(q, device=rows.device)
    first = last_tokens.index_select(0, rows).unsqueeze(1)
    texts = torch.cat([first, drafts.index_select(0, rows)[:, : q - 1].long()], 1)
    real = is_real.unsqueeze(1)
    return VerifyInputs(
        input_ids=(texts * real).view(-1),
        positions=((length.unsqueeze(1) + steps) * real).long().view(-1),
        token_rows=rows.unsqueeze(1).expand(num_requests, q).reshape(-1),
        seq_lens=torch.where(is_real, length + q, 1).int(),
        query_starts=torch.arange(0, num_requests * q, q, dtype=torch.int32, device=rows.device),
        query_lens=query_lens,
    )
