"""The inputs of a draft's passes: what a row has to catch up with, then one token after another.

A head pairs the token at position p with the target's feature of position p - 1 and keeps it at slot p - 1; a
whole model has the token at slot p (`offset` is 1 and 0). Of each row there are features of some positions in
a row, the first of them `base`: those of the last step's tokens.

    position     base   ...        L        features of base to base + a, from the last step: a = L - base - 1
    token        (old)  d_1 .. d_a last     the first pass computes those behind base, `last` at least
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda.compiled import is_compiling_only


class ChainStart(NamedTuple):
    """The first pass: `width` places a request, as many of them in use as the last step brought tokens."""

    input_ids: Tensor
    """int64 [R * width]."""
    positions: Tensor
    """int64 [R * width]: slots."""
    token_rows: Tensor
    """int32 [R * width]; 0 for places that are not in use."""
    seq_lens: Tensor
    """int32 [R]: slots, those of this pass included; 1 for padding."""
    query_starts: Tensor
    """int32 [R]."""
    query_lens: Tensor
    """int32 [R]: places in use; 0 for padding."""
    features: Tensor
    """int64 [R * width]: where in [max_rows * kept features] the feature of each token is."""
    ends: Tensor
    """int64 [R]: the place of the last token of each request."""


class ChainNext(NamedTuple):
    """A pass of one token a request."""

    positions: Tensor
    """int64 [R]: slots."""
    seq_lens: Tensor
    """int32 [R]; 1 for padding."""
    query_lens: Tensor
    """int32 [R]: 1, and 0 for padding."""


def chain_start(
    rows: Tensor,
    width: int,
    offset: int,
    lengths: Tensor,
    last_tokens: Tensor,
    drafts: Tensor,
    base: Tensor,
    num_features: int,
) -> ChainStart:
    """What `rows` int32 [R] have to catch up with: tokens behind position `base`, up to their last one.

    All else by request row, as in `SpecState`; `base` int32 [max_rows]. Drafts up to there were accepted. The
    last token is computed in any case, the others as far as `width` reaches. A row keeps `num_features`.
    """
    if rows.is_cuda:
        from . import triton_chains

        texts = (lengths, last_tokens, drafts, base)
        launched = triton_chains.chain_start(rows, width, offset, *texts, num_features)
        if not is_compiling_only():
            return ChainStart(*launched)
        # The kernel did not run; but its results are places in tables, which must exist.
    real = rows != 0
    length = lengths.index_select(0, rows).long()
    first = base.index_select(0, rows).long()
    count = (length - first).clamp(1, width)
    steps = torch.arange(width, device=rows.device)
    positions = (length - count + 1).unsqueeze(1) + steps
    is_last = steps == (count - 1).unsqueeze(1)
    is_used = (steps < count.unsqueeze(1)) & real.unsqueeze(1)
    # The feature of the token before a token; and if that is no draft, the token is the last one.
    behind = (positions - first.unsqueeze(1) - 1).clamp(0, num_features - 1)
    drafted = drafts.index_select(0, rows).long().gather(1, behind.clamp(max=drafts.size(1) - 1))
    tokens = torch.where(is_last, last_tokens.index_select(0, rows).unsqueeze(1), drafted)
    starts = torch.arange(0, rows.size(0) * width, width, dtype=torch.int32, device=rows.device)
    return ChainStart(
        input_ids=(tokens * is_used).view(-1),
        positions=((positions - offset) * is_used).view(-1),
        token_rows=(rows.unsqueeze(1) * is_used).view(-1).int(),
        seq_lens=torch.where(real, length + 1 - offset, 1).int(),
        query_starts=starts,
        query_lens=(count * real).int(),
        features=((rows.long().unsqueeze(1) * num_features + behind) * is_used).view(-1),
        ends=starts.long() + torch.where(real, count - 1, 0),
    )


def chain_next(rows: Tensor, lengths: Tensor, ahead: int) -> ChainNext:
    """A pass of one token for each of `rows` int32 [R], at slot lengths[row] + `ahead`."""
    if rows.is_cuda:
        from . import triton_chains

        launched = triton_chains.chain_next(rows, lengths, ahead)
        if not is_compiling_only():
            return ChainNext(*launched)
    real = rows != 0
    positions = (lengths.index_select(0, rows) + ahead).long() * real
    return ChainNext(positions, torch.where(real, positions + 1, 1).int(), real.int())


def note_best(
    logits: Tensor, rows: Tensor, number: int, drafts: Tensor, target_offsets: Tensor | None
) -> Tensor:
    """int64 [R]: the best token of float32 logits [R, draft vocabulary], also draft `number` of its row.

    `rows` int32 [R]; `drafts` [max_rows, K]. `target_offsets` int64 [draft vocabulary]: what is added to an
    id of the draft to make it the target's; None: they are the same. Padding's is 0.
    """
    if logits.is_cuda:
        from . import triton_chains

        return triton_chains.note_best(logits, rows, number, drafts, target_offsets)
    best = logits.argmax(-1)
    if target_offsets is not None:
        best = best + target_offsets.index_select(0, best)
    best = best * (rows != 0)
    drafts[:, number].index_copy_(0, rows.long(), best.to(drafts.dtype))
    return best
