"""Sampling for requests that ask for more than a temperature and a seed, and for them alone.

Plain sampling has chosen the tokens of all others, and written the step's line; here the tokens of those that
ask are put into it. On a GPU nothing of it is done for rows that do not ask for it: `triton_adjusted` changes
logits and draws, `triton_amend` finds out whether the filters leave what was drawn and returns it; of the
others `filters.triton_find_cuts` finds what they leave, and `triton_redraw` draws again. On a CPU it is plain
torch, and the definition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..constants import GREEDY_BELOW
from ..custom_op import custom_op
from . import torch_reference
from .asked import Asked
from .token_lines import LINE_HEAD, LogprobLines, TokenLines

_PIECE_BYTES = 24 << 20
"""What an intermediate over the vocabulary may take on a CPU: sorting many rows at once takes GBs."""


def sample_asking(
    logits: Tensor,
    rows: Tensor,
    places: Tensor,
    asked: Asked,
    lines: TokenLines,
    logprobs: LogprobLines,
    *,
    has_filters: bool,
) -> None:
    """Sample for n requests, and amend the newest line: tokens and, at the places 0 to n - 1, logprobs.

    `rows` int32 [n]: the requests' rows, 0 for padding. `places` int32 [n]: of each, its line of the float32
    logits [R, vocab] and its place among the tokens. Without `has_filters` nobody asks for top-k, top-p or
    min-p.
    """
    *constant, generated = asked
    _sample_asking(logits, rows, places, constant, generated, *lines, *logprobs, has_filters)


@custom_op(
    "sample_asking", mutates_args=("generated", "last_tokens", "ring", "values", "logprob_tokens", "ranks")
)
def _sample_asking(
    logits: Tensor,
    rows: Tensor,
    places: Tensor,
    asked: Sequence[Tensor],
    generated: Tensor,
    last_tokens: Tensor,
    ring: Tensor,
    counts: Tensor,
    began: Tensor,
    values: Tensor,
    logprob_tokens: Tensor,
    ranks: Tensor,
    has_filters: bool,
) -> None:
    lines = TokenLines(last_tokens, ring, counts, began)
    sample = by_kernels if logits.is_cuda else reference
    logprobs = LogprobLines(values, logprob_tokens, ranks)
    sample(logits, rows, places, Asked._make([*asked, generated]), lines, logprobs, has_filters)


def by_kernels(
    logits: Tensor,
    rows: Tensor,
    places: Tensor,
    asked: Asked,
    lines: TokenLines,
    logprobs: LogprobLines,
    has_filters: bool,
) -> None:
    """`sample_asking` on a GPU, or in Triton's interpreter."""
    from .filters.triton_cuts import Cuts, Verdicts
    from .filters.triton_find_cuts import find_cuts
    from .triton_adjusted import draw_adjusted
    from .triton_amend import amend
    from .triton_redraw import redraw_and_return
    from .triton_row_end import Parts

    size = (rows.size(0), logits.size(1))
    parts = Parts.empty(*size, logprobs, logits.device)
    verdicts = Verdicts.empty(*size, logits.device)
    of_rows = (logits, rows, places, asked)
    drawn = draw_adjusted(*of_rows, has_filters=has_filters)
    amend(*of_rows, drawn, verdicts, parts, lines, logprobs, has_filters=has_filters)
    if has_filters:
        cuts = Cuts.empty(*size, logits.device)
        find_cuts(drawn.logits, rows, asked.filters, drawn.surveyed, verdicts.verdicts, drawn.arrived, cuts)
        redraw_and_return(*of_rows, drawn, verdicts.verdicts, cuts, parts, lines, logprobs)


def draw_filtered(logits: Tensor, rows: Tensor, places: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
    """Draw for n requests on a GPU and return nothing: `Drawn.best` after filters."""
    from .filters.triton_candidate import judge
    from .filters.triton_cuts import Cuts, Verdicts
    from .filters.triton_find_cuts import find_cuts
    from .triton_adjusted import draw_adjusted
    from .triton_redraw import redraw

    size = (rows.size(0), logits.size(1), logits.device)
    verdicts, cuts = Verdicts.empty(*size), Cuts.empty(*size)
    drawn = draw_adjusted(logits, rows, places, asked, has_filters=True)
    judge(drawn.logits, rows, asked.filters, drawn.surveyed, drawn.best, verdicts, drawn.arrived)
    find_cuts(drawn.logits, rows, asked.filters, drawn.surveyed, verdicts.verdicts, drawn.arrived, cuts)
    redraw(rows, asked, drawn, verdicts.verdicts, cuts)
    return drawn.best


def reference(
    logits: Tensor,
    rows: Tensor,
    places: Tensor,
    asked: Asked,
    lines: TokenLines,
    logprobs: LogprobLines,
    has_filters: bool,
) -> None:
    """`sample_asking` in plain torch. It looks at numbers: what nobody asks for is not done."""
    real = (rows != 0).nonzero().squeeze(1)
    if not real.numel():
        return
    number = (int(lines.counts[0]) - 1) % lines.ring.size(0)
    size = max(1, _PIECE_BYTES // (8 * logits.size(1)))
    for at in real.split(size):
        of, raw = rows[at].long(), logits[places[at].long()]
        tokens = filtered_tokens(adjusted(raw, of, asked), of, asked, has_filters=has_filters)
        lines.last_tokens[of] = tokens
        lines.ring[number, LINE_HEAD + places[at].long()] = tokens
        told = (asked.num_logprobs[of] >= 0).nonzero().squeeze(1)
        if told.numel():
            _tell(raw[told], tokens[told], logprobs, number, at[told])
        counted = has_penalties(asked, of)
        torch_reference.count_tokens(asked.generated, of[counted], tokens[counted])
    lines.ring[number, 3] = 1


def has_penalties(asked: Asked, rows: Tensor) -> Tensor:
    """bool [n]: whether earlier tokens of these rows change their logits."""
    return (asked.repetition[rows] != 1) | (asked.presence[rows] != 0) | (asked.frequency[rows] != 0)


def adjusted(logits: Tensor, rows: Tensor, asked: Asked) -> Tensor:
    """Logits [n, vocab] of rows int64 [n] with bias, bans, penalties and grammar, in this order."""
    logits = torch_reference.add_bias(logits, asked.bias_ids[rows].long(), asked.bias_values[rows])
    banned = asked.banned[rows].long()
    # Lengths say where the new tokens will stand: behind all that the forward pass has just computed.
    is_early = asked.lengths[rows] < asked.banned_before[rows]
    is_banned = (banned >= 0) & is_early.unsqueeze(1)
    logits = torch_reference.ban(logits, banned.clamp(min=0), is_banned)
    penalised = has_penalties(asked, rows).nonzero().squeeze(1)
    if penalised.numel():
        of = rows[penalised]
        costs = (asked.repetition, asked.presence, asked.frequency, asked.generated, asked.in_prompt)
        theirs = (of_all[of] for of_all in costs)
        logits[penalised] = torch_reference.apply_penalties(logits[penalised], *theirs)
    return torch_reference.allow(logits, asked.masks[rows])


def filtered_tokens(logits: Tensor, rows: Tensor, asked: Asked, *, has_filters: bool = True) -> Tensor:
    """int64 [n]: drawn from adjusted logits [n, vocab] of rows int64 [n], after their filters."""
    drawn_by = (asked.temperature[rows], asked.seeds[rows], asked.lengths[rows])
    tokens = torch_reference.sample_unfiltered(logits, *drawn_by)
    if has_filters:
        filters = (asked.top_k[rows], asked.top_p[rows], asked.min_p[rows])
        is_filtered = (filters[0] > 0) | (filters[1] < 1) | (filters[2] > 0)
        some = (is_filtered & (drawn_by[0] >= GREEDY_BELOW)).nonzero().squeeze(1)
        if some.numel():
            heat, *numbers = (of_all[some] for of_all in drawn_by)
            left = (of_all[some] for of_all in filters)
            tokens[some] = torch_reference.sample(logits[some], heat, *left, *numbers)
    return tokens


def _tell(raw: Tensor, tokens: Tensor, lines: LogprobLines, number: int, at: Tensor) -> None:
    found = torch_reference.token_logprobs(raw, tokens, lines.values.size(2) - 1)
    lines.values[number, at] = torch.cat([found.chosen.unsqueeze(1), found.top], 1)
    lines.tokens[number, at] = torch.cat([tokens.unsqueeze(1), found.top_tokens], 1)
    lines.ranks[number, at] = found.rank
