"""Log-probabilities of the tokens of a prompt. Computed eagerly, because they are rarely requested."""

from __future__ import annotations

import torch

from ostinato.kernels.sampling import torch_reference
from ostinato.models.transformer import Transformer

from ..outputs import Logprob
from ..token_ids import IntArray

_PIECE = 256
"""Tokens whose logits are held at the same time."""
_PIECE_OF_ALL = 16
"""The same when all of them are sorted."""


@torch.no_grad()
def prompt_logprobs_of(
    model: Transformer, hidden: torch.Tensor, prompt_ids: IntArray, start: int, top_n: int
) -> list[dict[int, Logprob]]:
    """Log-probabilities of the prompt tokens after `hidden` [t, H], states of positions from `start` on.

    `top_n`: -1 for the whole vocabulary.
    """
    ids = prompt_ids[start + 1 : start + 1 + len(hidden)]
    targets = torch.tensor(ids, dtype=torch.int64, device=hidden.device)
    found: list[dict[int, Logprob]] = []
    vocab = model.config.vocab_size
    count = vocab if top_n < 0 else min(top_n, vocab)
    piece = _PIECE if count < 1000 else _PIECE_OF_ALL
    for begin in range(0, len(targets), piece):
        wanted = targets[begin : begin + piece]
        logits = model.logits(hidden[begin : begin + len(wanted)])
        of = torch_reference.token_logprobs(logits, wanted, count)
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
