# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Drafts from the text itself, on a GPU; see `ngram`.

A CTA has a text. It goes through it from the end, so that the first place with the longest match is the
latest, and stops there.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..custom_op import custom_op
from ..host_sizes import next_power_of_2

_BLOCK = 2048


@triton.jit(
    do_not_specialize=["num_drafts", "history_width", "text_width"],
    do_not_specialize_on_alignment=["rows", "lengths", "last_tokens", "history", "drafts"],
)
def _draft_ngram(
    rows,
    lengths,
    last_tokens,
    history,
    drafts,
    num_drafts,
    history_width,
    text_width,
    k: tl.constexpr,
    k_block: tl.constexpr,
    min_n: tl.constexpr,
    max_n: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    if row != 0:
        length = tl.load(lengths + row)
        last = tl.load(last_tokens + row).to(tl.int32)
        text = history + row * history_width
        # The most tokens that agree, from any place before the last backwards, and the latest such place.
        most = length * 0
        latest = most - 1
        end = tl.minimum(length, text_width)
        begin = (end - 1) // block * block
        while (begin >= 0) & (begin < end) & (most < max_n):
            place = begin + tl.arange(0, block)
            agrees = place < end
            agreeing = tl.zeros([block], tl.int32)
            for j in tl.static_range(max_n):
                wanted = last
                if j > 0:
                    # In a shorter text nothing agrees that far.
                    wanted = tl.load(text + tl.maximum(length - j, 0))
                held = agrees & (place >= j)
                found = tl.load(text + place - j, held, other=-1)
                agrees = held & (found == wanted)
                agreeing += agrees.to(tl.int32)
            best = tl.max(agreeing, 0)
            if best > most:
                most = best
                latest = tl.max(tl.where(agreeing == best, place, -1), 0)
            begin -= block
        latest = tl.where(most >= min_n, latest, length - 1)
        i = tl.arange(0, k_block)
        follows = latest + 1 + i % (length - latest)
        draft = tl.load(text + follows, (i < k) & (follows < length), other=0)
        draft = tl.where(follows == length, last, draft)
        tl.store(drafts + row * num_drafts + i, draft.to(drafts.dtype.element_ty), i < k)
        tl.store(text + length, last, length < history_width)


@custom_op("draft_ngram", mutates_args=("history", "drafts"))
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
    """Custom op of `ngram.draft_ngram`."""
    text_width = min(max_context, history.size(1))
    _draft_ngram[(rows.size(0),)](
        rows,
        lengths,
        last_tokens,
        history,
        drafts,
        drafts.stride(0),
        history.stride(0),
        text_width,
        k=k,
        k_block=next_power_of_2(k),
        min_n=min_n,
        max_n=max_n,
        block=min(_BLOCK, max(128, next_power_of_2(text_width))),
        enable_fp_fusion=True,
    )


@triton.jit(
    do_not_specialize=["history_width"],
    do_not_specialize_on_alignment=["rows", "lengths", "last_tokens", "history"],
)
def _note_history(rows, lengths, last_tokens, history, history_width):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    length = tl.load(lengths + row)
    last = tl.load(last_tokens + row).to(tl.int32)
    tl.store(history + row * history_width + length, last, (row != 0) & (length < history_width))


@custom_op("note_history", mutates_args=("history",))
def note_history(rows: Tensor, lengths: Tensor, last_tokens: Tensor, history: Tensor) -> None:
    """Custom op of `ngram.note_history`."""
    _note_history[(rows.size(0),)](
        rows, lengths, last_tokens, history, history.stride(0), enable_fp_fusion=True
    )
