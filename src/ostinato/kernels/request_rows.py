"""What a decode step reads from its requests' rows on the device, and what it leaves there.

A steady decode step brings nothing from the host but the rows it works on, and those stay the same: its input
tokens, positions and lengths are in the rows, and the step itself moves them on. Row 0 belongs to padding and
stays as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LINE_HEAD = 3
"""What a line of returned tokens begins with: the step's count, when its decode began, when it ended."""


class DecodeInputs(NamedTuple):
    """The inputs of a step of one token per request."""

    input_ids: Tensor
    """int64 [R]: the token each row sampled last."""
    positions: Tensor
    """int64 [R]: where it stands in its request."""
    seq_lens: Tensor
    """int32 [R]: context length, this token included; 1 for padding."""
    query_lens: Tensor
    """int32 [R]: 1, and 0 for padding."""


def begin_decode(rows: Tensor, lengths: Tensor, last_tokens: Tensor, began: Tensor) -> DecodeInputs:
    """Read the step's inputs from `rows` int32 [R], and advance their `lengths` int32 [max_rows] by one.

    On a GPU the time goes into `began` int64 [1], in nanoseconds of the device's own clock.
    """
    if rows.is_cuda:
        from . import triton_request_rows

        return DecodeInputs(*triton_request_rows.begin_decode(rows, lengths, last_tokens, began))
    positions = lengths.index_select(0, rows)
    query_lens = (rows != 0).to(torch.int32)
    seq_lens = positions + 1
    lengths.index_copy_(0, rows.long(), seq_lens * query_lens)
    return DecodeInputs(last_tokens.index_select(0, rows), positions.long(), seq_lens, query_lens)


def set_lengths(rows: Tensor, lengths: Tensor, seq_lens: Tensor) -> None:
    """Note that the context of these rows is now as long as `seq_lens` int32 [R] says."""
    lengths.index_copy_(0, rows.long(), seq_lens * (rows != 0))


def keep_tokens(rows: Tensor, last_tokens: Tensor, tokens: Tensor) -> None:
    """Leave the sampled `tokens` int64 [R] where the next step of these rows finds them."""
    last_tokens.index_copy_(0, rows.long(), tokens * (rows != 0))


def return_tokens(
    rows: Tensor, last_tokens: Tensor, tokens: Tensor, ring: Tensor, count: Tensor, began: Tensor
) -> None:
    """`keep_tokens`, and write the tokens into host memory: no copy has to be queued behind the graph.

    `ring` int64 [slots, LINE_HEAD + max_rows], pinned: the steps use its lines in turn. `count` int64 [1], on
    the device, counts them; a line begins with the count of the step whose tokens it holds, with `began`, and
    with the time at which it ends. CUDA only.
    """
    from . import triton_request_rows

    triton_request_rows.return_tokens(rows, last_tokens, tokens, ring, count, began)
