"""Requests that ask for a temperature and a seed at most: their tokens, and the end of every step.

On a GPU two kernels: `triton_draw`, and `triton_return`, which itself writes to the host: no copy has to be
queued behind the graph. On a CPU plain torch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..constants import GREEDY_BELOW
from ..custom_op import custom_op
from .token_lines import LINE_HEAD, TokenLines
from .torch_reference import sample_unfiltered


class PlainSettings(NamedTuple):
    """What plain sampling asks of n request rows."""

    is_plain: Tensor
    """int32 [n]: 0 for rows that ask for more, and for padding: they are passed over."""
    temperature: Tensor
    """float32 [n]; 0 is greedy."""
    seeds: Tensor
    """int64 [n]: as in Asked."""
    lengths: Tensor
    """int32 [n]: where in its request the new token will stand."""


def return_plain(logits: Tensor, rows: Tensor, settings: PlainSettings, lines: TokenLines) -> None:
    """Choose a token for each row of float32 logits [R, vocab]; write it into its row and into the next line.

    `rows` int32 [R]: the requests' rows. Tokens of requests that are not plain are 0. Each row needs one
    finite logit.
    """
    if logits.is_cuda:
        from . import triton_draw, triton_return

        values, tokens = triton_draw.best_of_blocks(logits, rows, *settings)
        triton_return.return_best(rows, values, tokens, logits.size(1), *lines)
    else:
        return_tokens(rows, plain_tokens(logits, rows, *settings), lines)


def return_tokens(rows: Tensor, tokens: Tensor, lines: TokenLines) -> None:
    """Write `tokens` int64 [R] into their rows and into the next line, on a CPU."""
    lines.last_tokens.index_copy_(0, rows.long(), tokens * (rows != 0))
    count, ring = lines.counts[:1], lines.ring[:, : LINE_HEAD + tokens.size(0)]
    line = torch.cat([count, count.new_zeros(LINE_HEAD - 1), tokens])
    ring.index_copy_(0, count % ring.size(0), line.unsqueeze(0))
    count.add_(1)


@custom_op("plain_tokens", result=lambda logits: logits.new_empty(logits.size(0), dtype=torch.int64))
def plain_tokens(
    logits: Tensor, rows: Tensor, is_plain: Tensor, temperature: Tensor, seeds: Tensor, lengths: Tensor
) -> Tensor:
    """int64 [R]: tokens, 0 for rows that are not plain; all else as in `return_plain`, on a CPU."""
    # One op to whoever records it, like a kernel: inside it looks at numbers, and most rows need no noise.
    heat = temperature.index_select(0, rows)
    is_taken = is_plain.index_select(0, rows) != 0
    tokens = torch.where(is_taken, logits.argmax(-1), 0)
    random = (is_taken & (heat >= GREEDY_BELOW)).nonzero().squeeze(1)
    if random.numel():
        theirs = rows[random]
        drawn_by = heat[random], seeds.index_select(0, theirs), lengths.index_select(0, theirs)
        tokens[random] = sample_unfiltered(logits[random], *drawn_by)
    return tokens
