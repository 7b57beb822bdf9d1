"""The step that verifies drafts: its inputs, read from the request slots, and what is kept of its draws.

The output ring's entry of such a step has, behind its head and each for all R requests of the capture size:

    tokens of position 0 | how many are new, 0 for padding | tokens of position 1 | ... | of position q - 1

A place behind a request's new tokens has NO_TOKEN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda.compiled import is_compiling_only
from ..custom_op import custom_op
from ..sampling.asked import Asked
from ..sampling.asking_rows import adjusted, draw_filtered, filtered_tokens
from ..sampling.plain import PlainSettings, plain_tokens
from ..sampling.token_lines import LINE_HEAD, TokenLines
from ..sampling.torch_reference import uniform
from .state import NO_TOKEN, SpecState


class VerifyInputs(NamedTuple):
    """R requests of q tokens each, one request after another: token i of request r is r * q + i."""

    input_ids: Tensor
    """int64 [R * q]: the last token and the drafts."""
    positions: Tensor
    """int64 [R * q]."""
    token_rows: Tensor
    """int32 [R * q]."""
    seq_lens: Tensor
    """int32 [R]: context length, all q tokens included; 1 for padding."""
    query_starts: Tensor
    """int32 [R]."""
    query_lens: Tensor
    """int32 [R]: q, and 0 for padding."""


def begin_verify(
    rows: Tensor, q: int, lengths: Tensor, last_tokens: Tensor, drafts: Tensor, began: Tensor | None
) -> VerifyInputs:
    """Read the inputs of a step of q tokens from `rows` int32 [R]; nothing is changed, `accept` does that.

    All else by request row, as in `SpecState`. On a GPU the time goes into `began` int64 [1], in nanoseconds
    of the device's own clock; None: a draft before it has noted when the step began.
    """
    if rows.is_cuda:
        from . import triton_verification

        launched = triton_verification.begin_verify(rows, q, lengths, last_tokens, drafts, began)
        if not is_compiling_only():
            return VerifyInputs(*launched)
        # The kernel did not run; but its results are places in tables, which must exist.
    num_requests = rows.size(0)
    is_real = rows != 0
    query_lens = is_real.int() * q
    length = lengths.index_select(0, rows) * is_real
    steps = torch.arange(q, device=rows.device)
    first = last_tokens.index_select(0, rows).unsqueeze(1)
    texts = torch.cat([first, drafts.index_select(0, rows)[:, : q - 1].long()], 1)
    real = is_real.unsqueeze(1)
    return VerifyInputs(
        input_ids=(texts * real).view(-1),
        positions=((length.unsqueeze(1) + steps) * real).long().view(-1),
        token_rows=rows.unsqueeze(1).expand(num_requests, q).reshape(-1),
        seq_lens=torch.where(is_real, length + q, 1).int(),
        query_starts=torch.arange(0, num_requests * q, q, dtype=torch.int32, device=rows.device),
        query_lens=query_lens,
    )


def verified_line(num_requests: int, q: int) -> int:
    """Returns the length of such a step's ring entry behind its head."""
    return num_requests * (q + 1)


def accept(
    logits: Tensor,
    rows: Tensor,
    q: int,
    settings: PlainSettings,
    state: SpecState,
    synthetic: Tensor | None,
    lines: TokenLines,
) -> None:
    """Draw from float32 logits [q * R, vocab], line i * R + r of request r's token i; keep what agrees.

    `rows` int32 [R]: the requests' rows. Their lengths, last tokens, numbers of accepted drafts and texts
    move on, and the new tokens go into the next line. A request that is not plain has one new token, 0.
    `settings.lengths` are those of the state. `synthetic` float32 [K], none larger than the one before it:
    the chance that the first i + 1 drafts are accepted, whatever was drawn; by a hash of seed and position.
    """
    if logits.is_cuda:
        from . import triton_verification

        triton_verification.accept(logits, rows, q, settings, state, synthetic, lines)
        return
    count = rows.size(0)
    real, length = rows != 0, state.lengths.index_select(0, rows)
    at = torch.arange(q, device=rows.device).unsqueeze(1)
    positions = (length + 1 + at).view(-1)
    asked = (settings.is_plain, settings.temperature, settings.seeds)
    is_plain, heat, seeds = (each.index_select(0, rows).repeat(q) for each in asked)
    lines_of_logits = torch.arange(q * count, dtype=torch.int32, device=rows.device)
    drawn = plain_tokens(logits, lines_of_logits, is_plain, heat, seeds, positions).view(q, count)
    drafts = state.drafts.index_select(0, rows)[:, : q - 1].T.long()
    if synthetic is None:
        agrees = drafts == drawn[: q - 1]
    else:
        # Another seed than that of the draws.
        chance = uniform(~settings.seeds.index_select(0, rows), length + 1, 1).T
        agrees = chance < synthetic[: q - 1].unsqueeze(1)
    agrees &= at[: q - 1] < state.limits.index_select(0, rows)
    accepted = agrees.long().cumprod(0).sum(0)
    tokens = drawn
    if synthetic is not None:
        ahead = torch.cat([drafts, drawn[-1:]])
        tokens = torch.where(at < accepted, ahead, drawn)
    _move_on(rows, real, length, accepted, tokens, state)
    new = (accepted + 1) * real
    places = torch.where(at < new, tokens, NO_TOKEN)
    _write_line(torch.cat([tokens[0], new, places[1:].reshape(-1)]), lines)


def _move_on(
    rows: Tensor, real: Tensor, length: Tensor, accepted: Tensor, tokens: Tensor, state: SpecState
) -> None:
    places = rows.long()
    last = tokens.gather(0, accepted.unsqueeze(0)).squeeze(0)
    state.lengths.index_copy_(0, places, ((length + 1 + accepted) * real).int())
    state.last_tokens.index_copy_(0, places, last * real)
    state.num_accepted.index_copy_(0, places, (accepted * real).int())
    if state.history is None:
        return
    width = state.history.size(1)
    for i in range(tokens.size(0)):
        is_new = real & (i <= accepted) & (length + 1 + i < width)
        note_token(places, length + 1 + i, tokens[i], is_new, state.history)


def note_token(rows: Tensor, positions: Tensor, tokens: Tensor, chosen: Tensor, history: Tensor) -> None:
    """history[row, position] = token, for those that are chosen, in rows that differ."""
    # The others write what row 0 has at position 0 to that very place.
    flat = history.view(-1)
    places = torch.where(chosen, rows * history.size(1) + positions, 0)
    flat.index_copy_(0, places, torch.where(chosen, tokens.int(), flat[:1]))


def _write_line(values: Tensor, lines: TokenLines) -> None:
    count, ring = lines.counts[:1], lines.ring[:, : LINE_HEAD + values.size(0)]
    line = torch.cat([count, count.new_zeros(LINE_HEAD - 1), values])
    ring.index_copy_(0, count % ring.size(0), line.unsqueeze(0))
    count.add_(1)


_PIECE_BYTES = 24 << 20
"""What an intermediate over the vocabulary may take on a CPU."""


def tokens_of_asking(logits: Tensor, rows: Tensor, places: Tensor, asked: Asked) -> Tensor:
    """int64 [n]: a token for each of `rows` int32 [n], 0 for row 0, from the line of float32 logits [lines,
    vocab] that `places` int32 [n] says. Filters, biases, bans and masks count; nothing is written."""
    return _tokens_of_asking(logits, rows, places, list(asked))


@custom_op("tokens_of_asking", result=lambda rows: rows.new_empty(rows.size(0), dtype=torch.int64))
def _tokens_of_asking(logits: Tensor, rows: Tensor, places: Tensor, asked: Sequence[Tensor]) -> Tensor:
    choose = _by_kernels if logits.is_cuda else _reference
    return choose(logits, rows, places, Asked._make(asked))


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
