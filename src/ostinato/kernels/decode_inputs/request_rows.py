"""What a decode step reads from its requests' rows on the device.

A steady decode step brings nothing from the host but the rows it works on, and those stay the same: its input
tokens, positions and lengths are in the rows, and the step itself moves them on. Row 0 belongs to padding and
stays as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda.compiled import is_compiling_only


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

        launched = triton_request_rows.begin_decode(rows, lengths, last_tokens, began)
        if not is_compiling_only():
            return DecodeInputs(*launched)
        # The kernel did not run; but its results are places in tables, which must exist.
    positions = lengths.index_select(0, rows)
    query_lens = (rows != 0).to(torch.int32)
    seq_lens = positions + 1
    lengths.index_copy_(0, rows.long(), seq_lens * query_lens)
    return DecodeInputs(last_tokens.index_select(0, rows), positions.long(), seq_lens, query_lens)


def note_time(began: Tensor) -> None:
    """On a GPU, put the time into `began` int64 [1], as `begin_decode` does; a CPU notes none."""
    if began.is_cuda:
        from . import triton_request_rows

        triton_request_rows.note_time(began)


def set_lengths(rows: Tensor, lengths: Tensor, seq_lens: Tensor) -> None:
    """Note that the context of these rows is now as long as `seq_lens` int32 [R] says."""
    lengths.index_copy_(0, rows.long(), seq_lens * (rows != 0))
