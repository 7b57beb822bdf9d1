"""The end of a step that verifies drafts: draws, comparison, what is kept, and the way to the host.

A line of tokens (`TokenLines`) of such a step has, behind its head and each for all R requests of the rung:

    tokens of position 0 | how many are new, 0 for padding | tokens of position 1 | ... | of position q - 1

A place behind a request's new tokens has NO_TOKEN.
"""

import torch
from torch import Tensor

from ..sampling.plain import PlainSettings, plain_tokens
from ..sampling.token_lines import LINE_HEAD, TokenLines
from ..sampling.torch_reference import uniform
from .state import NO_TOKEN, SpecState


def verified_line(num_requests: int, q: int) -> int:
    """What a line of such a step has behind its head."""
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
        from . import triton_acceptance

        triton_acceptance.accept(logits, rows, q, settings, state, synthetic, lines)
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
