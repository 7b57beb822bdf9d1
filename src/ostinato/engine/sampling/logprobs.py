"""Log-probabilities: of sampled tokens from sampling graphs, and of whole prompts.

With `logprobs_mode="processed_logprobs"` they are those of the distribution that tokens are drawn from: the
model's own after bias, bans, penalties, masks, callers' functions, temperature and filters. For requests that
change none of it, the sampling graphs return these log-probabilities; for the others they are computed here,
in plain torch after the graph that drew, a few rows at a time. Those of prompts are computed eagerly, because
they are rarely requested.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from ostinato.kernels.constants import GREEDY_BELOW
from ostinato.kernels.sampling import filters, torch_reference
from ostinato.kernels.sampling.asked import Asked
from ostinato.models.transformer import Transformer

from ..outputs import Logprob
from ..parameters.sampling_params import SamplingParams
from ..scheduling.request import IntArray
from ..stepping.token_return import BesideLines

_PIECE_BYTES = 16 << 20
"""The most that an intermediate over the vocabulary may take."""


class Change(IntEnum):
    """What a request does to the model's distribution; each value includes the smaller ones."""

    NOTHING = 0
    TEMPERATURE = 1
    LOGITS = 2
    """Bias, bans, penalties, masks, functions."""
    FILTERS = 3
    """Top-k, top-p, min-p."""

    @classmethod
    def of(cls, params: SamplingParams, is_processed: bool) -> Change:
        """`is_processed`: callers' functions change the logits."""
        if not params.is_greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0):
            return cls.FILTERS
        is_masked = params.structured_outputs is not None or params.allowed_token_ids is not None
        if is_masked or params.bad_words or params.min_tokens or params.logit_bias or params.has_penalties:
            return cls.LOGITS
        if is_processed:
            return cls.LOGITS
        is_heated = not params.is_greedy and params.temperature != 1
        return cls.TEMPERATURE if is_heated else cls.NOTHING


def drawn_logits(
    logits: Tensor, rows: Tensor, asked: Asked, change: Change, tokens: Tensor | None = None
) -> Tensor:
    """float32 [n, vocab], the logits that the tokens of rows int64 [n] are drawn from, by softmax.

    `tokens` int64 [n]: the drawn ones, if they are already counted as generated.
    """
    if change >= Change.LOGITS:
        logits = _adjusted(logits, rows, asked, tokens)
    temperature = asked.temperature[rows]
    if change == Change.FILTERS:
        cut = (asked.top_k[rows], asked.top_p[rows], asked.min_p[rows])
        left = filters.is_kept(logits, *filters.reference(logits, temperature, *cut))
        if tokens is not None:
            # A sum at the very edge of top_p may go either way, and the draw has decided which.
            left.scatter_(1, tokens.unsqueeze(1), True)
        logits = logits.masked_fill(~left, float("-inf"))
    return logits / torch.where(temperature < GREEDY_BELOW, 1.0, temperature).unsqueeze(1)


def _adjusted(logits: Tensor, rows: Tensor, asked: Asked, tokens: Tensor | None) -> Tensor:
    """`asking_rows.adjusted` without reading values, for which the host would have to wait."""
    logits = torch_reference.add_bias(logits, asked.bias_ids[rows].long(), asked.bias_values[rows])
    banned = asked.banned[rows].long()
    is_early = asked.lengths[rows] < asked.banned_before[rows]
    logits = torch_reference.ban(logits, banned.clamp(min=0), (banned >= 0) & is_early.unsqueeze(1))
    generated = asked.generated[rows]
    if tokens is not None:
        generated.scatter_add_(1, tokens.unsqueeze(1), torch.full_like(generated[:, :1], -1))
    costs = (asked.repetition[rows], asked.presence[rows], asked.frequency[rows])
    logits = torch_reference.apply_penalties(logits, *costs, generated, asked.in_prompt[rows])
    return torch_reference.allow(logits, asked.masks[rows])


def beside(
    logits: Tensor,
    rows: IntArray,
    places: IntArray,
    asked: Asked,
    change: Change,
    last_tokens: Tensor,
    num_top: int,
) -> BesideLines:
    """Log-probabilities of the tokens that these rows have just got, on their way to the host."""
    device = logits.device
    of, at = (torch.from_numpy(each.astype("int64")).to(device, non_blocking=True) for each in (rows, places))
    size = max(1, _PIECE_BYTES // (4 * logits.size(1)))
    found = []
    for some, lines in zip(of.split(size), at.split(size), strict=True):
        tokens = last_tokens[some].long()
        drawn = drawn_logits(logits[lines], some, asked, change, tokens)
        told = torch_reference.token_logprobs(drawn, tokens, num_top)
        values = torch.cat([told.chosen.unsqueeze(1), told.top], 1)
        found.append((values, torch.cat([tokens.unsqueeze(1), told.top_tokens], 1), told.rank))
    values, named, ranks = (_on_the_way(torch.cat(part)) for part in zip(*found, strict=True))
    return BesideLines(places.astype("int64"), values, named, ranks)


def _on_the_way(found: Tensor) -> Tensor:
    if not found.is_cuda:
        return found
    there = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    return there.copy_(found, non_blocking=True)


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
