"""From the hidden states of a prompt to one vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..sampling_params import RequestError

POOLINGS = ("last", "mean")
"""The state of the last token, or the mean of all."""


def check_pooling(pooling: str) -> None:
    """RequestError if there is no such pooling."""
    if pooling not in POOLINGS:
        raise RequestError(f"unknown pooling {pooling!r}: use {' or '.join(POOLINGS)}")


def pooled(states: Sequence[torch.Tensor], num_tokens: int, pooling: str) -> torch.Tensor:
    """A vector of length 1 from the states of a prompt of `num_tokens`, as its steps brought them."""
    # A preempted request computes its prompt again: the last states are those that count.
    counted = torch.cat(list(states))[-num_tokens:].float()
    vector = counted[-1] if pooling == "last" else counted.mean(0)
    return torch.nn.functional.normalize(vector, dim=0)
