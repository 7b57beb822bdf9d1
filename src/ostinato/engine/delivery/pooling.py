"""From the hidden states of a prompt to a vector, or to the scores of the model's head."""

from __future__ import annotations

import torch

from ostinato.models.transformer import Transformer

from ..parameters.sampling_params import RequestError
from ..stepping.prompt_states import PromptStates

POOLINGS = ("last", "mean")
"""The state of the last token, or the mean of all."""


def check_pooling(pooling: str) -> None:
    """Raises RequestError for an unknown pooling."""
    if pooling not in POOLINGS:
        raise RequestError(f"unknown pooling {pooling!r}: use {' or '.join(POOLINGS)}")


def pooled(states: PromptStates, pooling: str) -> torch.Tensor:
    """A vector of length 1; waits for the device."""
    return torch.nn.functional.normalize(states.last if pooling == "last" else states.mean, dim=0)


def judged(model: Transformer, states: PromptStates, *, activates: bool = True) -> torch.Tensor:
    """Probabilities of the labels, or their logits; for a model with a classification head."""
    assert model.score is not None
    logits = model.score.weight.detach().float().cpu() @ states.last
    activation = model.config.label_activation if activates else "none"
    if activation == "none":
        return logits
    return logits.sigmoid() if activation == "sigmoid" else logits.softmax(0)
