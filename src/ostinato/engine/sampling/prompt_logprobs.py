"""Log-probabilities of the tokens of a prompt. Computed eagerly: it is rarely asked for."""

from __future__ import annotations

import torch

from ostinato.kernels.sampling import torch_reference
from ostinato.models.transformer import Transformer

from ..outputs import Logprob
from ..token_ids import IntArray

_PIECE = 256
"""Tokens whose logits are held at the same time."""


@torch.no_grad()
def prompt_logprobs_of(
    model: Transformer, hidden: torch.Tensor, prompt_ids: IntArray, start: int, top_n: int
) -> list[dict[int, Logprob]]:
    """What the prompt tokens that follow `hidden` [t, H], states of positions from `start` on, were given."""
    targets = torch.tensor(prompt_ids[start + 1 : start + 1 + len(hidden)], device=hidden.device)
    found: list[dict[int, Logprob]] = []
    for begin in range(0, len(targets), _PIECE):
        wanted = targets[begin : begin + _PIECE]
        logits = model.logits(hidden[begin : begin + len(wanted)])
        of = torch_reference.token_logprobs(logits, wanted, min(top_n, logits.size(1)))
        rows = zip(
            wanted.tolist(),
            of.chosen.tolist(),
            of.rank.tolist(),
            of.top_tokens.tolist(),
            of.top.tolist(),
            strict=True,
        )
        for token, value, rank, top_tokens, top in rows:
            entry = {token: Logprob(value, rank)}
            for place, (other, other_value) in enumerate(zip(top_tokens, top, strict=True), start=1):
                entry.setdefault(other, Logprob(other_value, place))
            found.append(entry)
    return found
