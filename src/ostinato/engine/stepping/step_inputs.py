"""What a step sends from the host: the inputs of its graphs, and lengths for attention outside them."""

import torch

from ostinato.graphs import BatchDescriptor, Field
from ostinato.kernels.attention.batch import PAGE_SIZE, HostLengths

from ..resolved_config import ResolvedConfig
from ..scheduling.request import IntArray
from ..scheduling.scheduled_step import ScheduledStep
from ..speculating.fields import LONGER, UNCHANGED

ON_DEVICE = HostLengths((), (), ())
"""Lengths that only the device knows, for a step whose attention runs outside graphs."""


def step_fields(vocab_size: int, max_model_len: int) -> tuple[Field, ...]:
    """The inputs of a step.

    Padded tokens belong to row 0, whose pages are all page 0; padded requests have no tokens. A decode graph
    uses only `req_rows`: everything else it needs is in those rows. Poisoned padding has any token at any
    place of page 0, and contexts of any length on that page. With drafts, the host does not know the lengths
    of decoding requests: see `Speculation.fill_in`.
    """
    last = min(PAGE_SIZE, max_model_len) - 1
    return (
        Field("input_ids", torch.int64, poison=vocab_size - 1),
        Field("positions", torch.int64, poison=last),
        Field("token_rows", torch.int32),
        Field("req_rows", torch.int32, per="request"),
        Field("seq_lens", torch.int32, per="request", pad=1, poison=last + 1),
        Field("query_starts", torch.int32, per="request"),
        Field("query_lens", torch.int32, per="request"),
    )


def inputs_of(step: ScheduledStep, *, is_drafting: bool = False) -> dict[str, IntArray]:
    """The inputs of a step. `is_drafting`: only the device knows the lengths of decoding requests, see
    `Speculation.fill_in`."""
    seq_lens = step.seq_lens
    if is_drafting:
        seq_lens = seq_lens.copy()
        seq_lens[: step.num_requests - len(step.prompt_tokens)] = UNCHANGED if step.num_drafts else LONGER
    return {
        "input_ids": step.input_ids,
        "positions": step.positions,
        "token_rows": step.token_rows,
        "req_rows": step.rows,
        "seq_lens": seq_lens,
        "query_starts": step.query_starts,
        "query_lens": step.num_new_tokens,
    }


def host_lengths(step: ScheduledStep) -> HostLengths:
    """Lengths for attention that runs outside a graph."""
    return HostLengths(step.query_starts.tolist(), step.num_new_tokens.tolist(), step.seq_lens.tolist())


def max_context(config: ResolvedConfig, descriptor: BatchDescriptor) -> int:
    """An upper bound on the context length of a step's requests."""
    return min(descriptor.context or config.max_positions, config.page_columns * PAGE_SIZE)
