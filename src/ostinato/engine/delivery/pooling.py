"""From the hidden states of a prompt to one vector."""

from __future__ import annotations

import torch

from ..parameters.sampling_params import RequestError
from ..stepping.prompt_states import PromptStates

POOLINGS = ("last", "mean")
"""The state of the last token, or the mean of all."""


def check_pooling(pooling: str) -> None:
    """RequestError if there is no such pooling."""
    if pooling not in POOLINGS:
        raise RequestError(f"unknown pooling {pooling!r}: use {' or '.join(POOLINGS)}")


def pooled(states: PromptStates, pooling: str) -> torch.Tensor:
    """A vector of length 1; waits for the device."""
    return torch.nn.functional.normalize(states.last if pooling == "last" else states.mean, dim=0)
