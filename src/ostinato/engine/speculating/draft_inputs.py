"""What a draft computes and keeps of a step of the target. Fixed shapes, nothing is read back.

A head pairs the token at position p with the target's feature of position p - 1, in slot p - 1. For each row,
features of consecutive positions are kept, starting at `base`: those of the last step's tokens. How a chain
uses them is in `kernels.speculation.chains`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ostinato.kernels.attention.batch import AttentionBatch

NO_FEATURE = -(1 << 20)
"""`base` of a row that has none."""


class Pairs(NamedTuple):
    """The tokens of a step of the target with the features before them."""

    features: Tensor
    """[T, H]: of the token before each."""
    batch: AttentionBatch


def pairs_of_step(batch: AttentionBatch, features: Tensor, stored: Tensor, base: Tensor) -> Pairs:
    """Each token of a step with the feature of the one before it, from `features` [T, H] of the same step.

    For a request's first token that feature is from the step before, in `stored` [max_rows, n, H]. If
    `stored` lacks it (the request starts here, or after pages that were found in the cache), the token is
    left out.
    """
    num_tokens, width = features.shape
    rows, has_tokens = batch.req_rows, batch.query_lens > 0
    start = batch.seq_lens - batch.query_lens
    before = (start - 1 - base.index_select(0, rows)).long()
    is_left_out = has_tokens & ((start == 0) | (before < 0) | (before >= stored.size(1)))
    places = rows.long() * stored.size(1) + before.clamp(0, stored.size(1) - 1)
    # One past the tokens: where requests without tokens write.
    firsts = torch.where(has_tokens, batch.query_starts, num_tokens).long()
    shifted = features.new_empty(num_tokens + 1, width)
    shifted[1:].copy_(features)
    shifted.index_copy_(0, firsts, stored.view(-1, width).index_select(0, places))
    stays = torch.ones(num_tokens + 1, dtype=torch.bool, device=rows.device)
    stays.index_copy_(0, firsts, ~is_left_out)
    stays = stays[:num_tokens] & (batch.token_rows != 0)
    left_out = is_left_out.int()
    pairs = replace(
        batch,
        token_rows=batch.token_rows * stays,
        positions=(batch.positions - 1) * stays,
        seq_lens=(batch.seq_lens - 1).clamp(min=1),
        query_starts=batch.query_starts + left_out,
        query_lens=batch.query_lens - left_out,
        prefix_lens=None,
    )
    return Pairs(shifted[:num_tokens], pairs)


def keep_features(
    batch: AttentionBatch, features: Tensor | None, lengths: Tensor, stored: Tensor, base: Tensor
) -> None:
    """Keep what the next step and the next drafts need of a step's `features` [T, H], and set `base`.

    Rows whose drafts are being verified have not advanced: the features of all their tokens are kept. For
    other rows only the last one is. `features` None: set `base` only.
    """
    rows, places = batch.req_rows, batch.req_rows.long()
    real = rows != 0
    is_verified = lengths.index_select(0, rows) != batch.seq_lens
    first = batch.seq_lens - torch.where(is_verified, batch.query_lens, 1)
    base.index_copy_(0, places, first * real)
    if features is None:
        return
    num_kept = min(stored.size(1), batch.max_query_len)
    steps = torch.arange(num_kept, device=rows.device)
    last = (batch.query_lens - 1).clamp(min=0).unsqueeze(1)
    # After the last one, the last one is repeated.
    kept = torch.where(is_verified.unsqueeze(1), torch.minimum(steps, last), last)
    chosen = (batch.query_starts.unsqueeze(1) + kept).clamp(max=features.size(0) - 1).long()
    found = features.index_select(0, chosen.view(-1)).view(rows.size(0), num_kept, -1)
    stored[:, :num_kept].index_copy_(0, places, found)
