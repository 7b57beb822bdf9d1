"""Drafts from the text itself: what followed when the last n tokens stood there before."""

import torch
from torch import Tensor

from .verification import note_token


def draft_ngram(
    rows: Tensor,
    k: int,
    lengths: Tensor,
    last_tokens: Tensor,
    history: Tensor,
    drafts: Tensor,
    min_n: int,
    max_n: int,
    max_context: int,
) -> None:
    """Write k drafts for each of `rows` int32 [R]; all else by request row, as in `SpecState`.

    The largest n from `min_n` to `max_n` counts for which the last n tokens, that at position L included,
    stood somewhere before, and of these places the latest. Where what follows there runs into the end, it
    begins again; where nothing is found, the last token is repeated. Notes the last token in `history` on the
    way. No text is longer than `max_context`, the token at L included.
    """
    max_n = min(max_n, max_context, history.size(1))  # no text is longer
    if rows.is_cuda:
        from . import triton_ngram

        by_row = (lengths, last_tokens, history, drafts)
        triton_ngram.draft_ngram(rows, k, *by_row, min_n, max_n, max_context)
        return
    note_history(rows, lengths, last_tokens, history)
    real, length = rows != 0, lengths.index_select(0, rows).long()
    width = min(max_context, history.size(1))
    texts = history.index_select(0, rows)[:, :width]
    ends = torch.arange(width, device=rows.device)
    # How many tokens agree, from each place backwards.
    agrees = ends < length.unsqueeze(1)
    agreeing = torch.zeros_like(texts)
    for j in range(max_n):
        wanted = texts.gather(1, (length - j).clamp(0, width - 1).unsqueeze(1))
        shifted = torch.cat([texts.new_full((texts.size(0), j), -1), texts[:, : width - j]], 1)
        agrees = agrees & (shifted == wanted)
        agreeing += agrees
    most = agreeing.amax(1, keepdim=True)
    latest = torch.where(agreeing == most, ends, -1).amax(1)
    found = most.squeeze(1) >= min_n
    latest = torch.where(found, latest, length - 1)
    period = (length - latest).clamp(min=1)
    steps = torch.arange(k, device=rows.device)
    places = latest.unsqueeze(1) + 1 + steps % period.unsqueeze(1)
    follows = texts.gather(1, places.clamp(0, width - 1)).to(drafts.dtype)
    drafts[:, :k].index_copy_(0, rows.long(), follows * real.unsqueeze(1))


def note_history(rows: Tensor, lengths: Tensor, last_tokens: Tensor, history: Tensor) -> None:
    """Enter the token that stands at position L, in rows that differ."""
    if rows.is_cuda:
        from . import triton_ngram

        triton_ngram.note_history(rows, lengths, last_tokens, history)
        return
    length = lengths.index_select(0, rows).long()
    chosen = (rows != 0) & (length < history.size(1))
    note_token(rows.long(), length, last_tokens.index_select(0, rows), chosen, history)
