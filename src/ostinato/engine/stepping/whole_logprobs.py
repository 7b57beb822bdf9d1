"""Log-probabilities of more tokens than sampling graphs return, of chosen tokens, or from before changes by a
caller's functions. The whole distribution of each such request comes to the host in every step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..outputs import Logprob
from ..parameters.sampling_params import SamplingParams

MOST_IN_GRAPHS = 20
"""The most alternatives per token that sampling graphs return."""


def wants_whole(params: SamplingParams, is_processed: bool) -> bool:
    """Whether a request's log-probabilities are computed here; `is_processed`: functions change logits."""
    if not params.wants_logprobs:
        return False
    asked = params.logprobs
    is_many = asked is not None and not 0 <= asked <= MOST_IN_GRAPHS
    return is_many or params.logprob_token_ids is not None or is_processed


def on_the_way(logits: Tensor) -> Tensor:
    """Log-probabilities from float32 logits [vocab], on the host once the device has got that far."""
    found = logits.log_softmax(-1)
    if not found.is_cuda:
        return found
    there = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    return there.copy_(found, non_blocking=True)


def told(values: Tensor, token: int, params: SamplingParams) -> dict[int, Logprob]:
    """The log-probabilities that a request wants for a step that gave it this token, which comes first."""
    own = float(values[token])
    found = {token: Logprob(own, _rank(values, own))}
    if params.logprob_token_ids is not None:
        for other in params.logprob_token_ids:
            value = float(values[other])
            found.setdefault(other, Logprob(value, _rank(values, value)))
        return found
    assert params.logprobs is not None
    count = len(values) if params.logprobs < 0 else min(params.logprobs, len(values))
    top = values.topk(count)
    for place, (other, value) in enumerate(zip(top.indices.tolist(), top.values.tolist(), strict=True), 1):
        found.setdefault(other, Logprob(value, place))
    return found


def _rank(values: Tensor, own: float) -> int:
    return int((values > own).sum()) + 1
