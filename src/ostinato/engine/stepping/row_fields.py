"""What every running request has on the device."""

import torch

from ostinato.kernels.lora import NO_ADAPTER

from ..row_field import RowField

MAX_BIASES = 512
"""Tokens that one request may bias."""
MAX_BANNED = 16
"""End-of-sequence and stop tokens that min_tokens can suppress."""


def row_fields(page_columns: int, *, has_adapters: bool = False) -> tuple[RowField, ...]:
    """The fields of a row, for requests of at most `page_columns` pages."""
    real, integer = torch.float32, torch.int32
    # After all others, which then lie where they do without adapters.
    of_adapters = (RowField("adapter_slots", integer, initial=NO_ADAPTER),) if has_adapters else ()
    return (
        RowField("lengths", integer, advances=True),
        RowField("last_tokens", torch.int64, advances=True),
        RowField("page_table", integer, page_columns),
        RowField("prefix_lens", integer),
        RowField("is_plain", integer),
        RowField("temperature", real),
        RowField("top_k", integer),
        RowField("top_p", real, initial=1),
        RowField("min_p", real),
        RowField("seeds", torch.int64),
        RowField("repetition", real, initial=1),
        RowField("presence", real),
        RowField("frequency", real),
        RowField("num_biases", integer),
        RowField("bias_ids", integer, MAX_BIASES),
        RowField("bias_values", real, MAX_BIASES),
        RowField("banned", integer, MAX_BANNED, initial=-1),
        RowField("banned_before", integer),
        RowField("num_logprobs", integer, initial=-1),
        *of_adapters,
    )
