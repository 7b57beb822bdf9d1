"""Tokens of requests that ask for more than a temperature and a seed, chosen and not returned.

For the places behind drafts: whether a token is the next one of its request is known only when those before
it are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..custom_op import custom_op
from ..sampling.asked import Asked
from ..sampling.asking_rows import adjusted, draw_filtered, filtered_tokens

_PIECE_BYTES = 24 << 20
"""What an intermediate over the vocabulary may take on a CPU."""


def tokens_of_asking(logits: Tensor, rows: Tensor, places: Tensor, asked: Asked) -> Tensor:
    """int64 [n]: a token for each of `rows` int32 [n], 0 for row 0, from the line of float32 logits [lines,
    vocab] that `places` int32 [n] says. Filters, biases, bans and masks count; nothing is written."""
    return _tokens_of_asking(logits, rows, places, list(asked))


@custom_op("tokens_of_asking")
def _tokens_of_asking(logits: Tensor, rows: Tensor, places: Tensor, asked: Sequence[Tensor]) -> Tensor:
    choose = _by_kernels if logits.is_cuda else _reference
    return choose(logits, rows, places, Asked._make(asked))


@_tokens_of_asking.register_fake
def _(logits: Tensor, rows: Tensor, *others: object) -> Tensor:
    return rows.new_empty(rows.size(0), dtype=torch.int64)


def _by_kernels(logits: Tensor, rows: Tensor, places: Tensor, asked: Asked) -> Tensor:
    values, tokens = draw_filtered(logits, rows, places, asked)
    best = tokens.gather(1, values.argmax(1, keepdim=True)).squeeze(1)
    # Of padding nothing was drawn: anything may stand there.
    return torch.where(rows != 0, best.long(), 0)


def _reference(logits: Tensor, rows: Tensor, places: Tensor, asked: Asked) -> Tensor:
    tokens = rows.new_zeros(rows.size(0), dtype=torch.int64)
    real = (rows != 0).nonzero().squeeze(1)
    if real.numel():
        for at in real.split(max(1, _PIECE_BYTES // (8 * logits.size(1)))):
            of = rows[at].long()
            tokens[at] = filtered_tokens(adjusted(logits[places[at].long()], of, asked), of, asked)
    return tokens
