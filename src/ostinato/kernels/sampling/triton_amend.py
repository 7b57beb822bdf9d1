# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""The end of a step in which requests ask for more: their tokens, counts and log-probabilities.

Log-probabilities are those of the raw logits. Programs over blocks of the vocabulary find the best tokens of
each, while others still draw, and then count those that are better than the chosen one. The last of a
request to end joins it all and writes it to the host; where no logprobs are asked for, the first. A token's
key and id in one integer make the order: likely ones first, of equal ones the smaller id.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from .. import dependent_launch
from ..dependent_launch import wait_for_previous
from ..host_sizes import cdiv, next_power_of_2
from .asked import Asked
from .filters import triton_cuts
from .filters.triton_search import key_of, value_of
from .token_lines import LINE_HEAD, LogprobLines, TokenLines
from .triton_adjusted import Drawn, has_penalties
from .triton_best import joined_block, token_of_row

_NOTHING = tl.constexpr(-9223372036854775808)
"""Less than any token."""
_LAST_ID = tl.constexpr(2147483647)
"""Smaller ids first: their bits are turned around."""


@triton.jit
def _raw_block(
    x, column, asked, to, part_best, part_sum, top, width: tl.constexpr, most_top: tl.constexpr
):  # fmt: skip
    """What a block of raw logits tells before it is known which token was chosen: its best ones, and sums."""
    best = tl.max(x, 0)
    shift = tl.where(best == float("-inf"), 0.0, best)
    tl.store(part_best + to, best)
    tl.store(part_sum + to, tl.sum(tl.exp(x - shift), 0))
    ordered = (key_of(x).to(tl.int64) << 32) | (column ^ _LAST_ID).to(tl.int64)
    ordered = tl.where(column < width, ordered, _NOTHING)
    for i in range(asked):
        likeliest = tl.max(ordered, 0)
        tl.store(top + to * most_top + i, likeliest)
        ordered = tl.where(ordered == likeliest, _NOTHING, ordered)


@triton.jit(
    do_not_specialize=["line_length", "num_lines", "most_rows"],
    do_not_specialize_on_alignment=["rows", "places", "last_tokens", "counts", "ring"],
)
def _amend(
    logits,
    rows,
    places,
    repetition,
    presence,
    frequency,
    num_logprobs,
    drawn,
    drawn_at,
    arrived,
    top,
    part_best,
    part_sum,
    part_rank,
    generated,
    last_tokens,
    ring,
    counts,
    values,
    tokens,
    ranks,
    row_stride,
    num_blocks,
    line_length,
    num_lines,
    most_rows,
    width: tl.constexpr,
    block: tl.constexpr,
    head: tl.constexpr,
    parts_block: tl.constexpr,
    most_top: tl.constexpr,
    num_values: tl.constexpr,
    timed: tl.constexpr,
    dependent: tl.constexpr,
):
    at, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    row, place = tl.load(rows + at).to(tl.int64), tl.load(places + at).to(tl.int64)
    asked = tl.load(num_logprobs + row)
    counted = has_penalties(tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row))
    is_told = (row != 0) & (asked >= 0)
    logits += place * row_stride
    column = part * block + tl.arange(0, block)
    # Raw logits are older than the first of these kernels: see `triton_adjusted`.
    x = tl.load(logits + column, mask=column < tl.where(is_told, width, 0), other=float("-inf"))
    if is_told:
        _raw_block(x, column, asked, at * num_blocks + part, part_best, part_sum, top, width, most_top)
    wait_for_previous(dependent)
    is_last = (row != 0) & (part == 0)
    token = tl.full([], 0, tl.int64)
    if is_last | is_told:
        token = token_of_row(drawn, drawn_at, at, num_blocks, width, parts_block)
    if is_told:
        better = (x > tl.load(logits + token)).to(tl.int32)
        tl.store(part_rank + at * num_blocks + part, tl.sum(better, 0))
        tl.debug_barrier()  # every thread has stored what it found
        is_last = tl.atomic_add(arrived + at, 1) == num_blocks - 1
    if is_last:
        number = (tl.load(counts) - 1) % num_lines
        line = ring + number * line_length
        tl.store(last_tokens + row, token)
        tl.store(line + head + place, token)
        if counted:
            tl.store(generated + row * width + token, tl.load(generated + row * width + token) + 1)
        if asked >= 0:
            parts = tl.arange(0, parts_block)
            is_part = parts < num_blocks
            best_of_parts = tl.load(part_best + at * num_blocks + parts, mask=is_part, other=float("-inf"))
            sums = tl.load(part_sum + at * num_blocks + parts, mask=is_part, other=0.0)
            better = tl.load(part_rank + at * num_blocks + parts, mask=is_part, other=0)
            best = tl.max(best_of_parts, 0)
            whole = best + tl.log(tl.sum(tl.where(sums > 0.0, sums * tl.exp(best_of_parts - best), 0.0), 0))
            to = number * most_rows + at
            tl.store(ranks + to, tl.sum(better, 0).to(tl.int64) + 1)
            tl.store(tokens + to * num_values, token)
            tl.store(values + to * num_values, tl.load(logits + token) - whole)
            i = tl.arange(0, most_top)[None, :]
            ordered = tl.load(
                top + (at * num_blocks + parts[:, None]) * most_top + i,
                mask=is_part[:, None] & (i < asked),
                other=_NOTHING,
            )
            for nth in range(1, asked + 1):
                likeliest = tl.max(tl.max(ordered, 1), 0)
                tl.store(values + to * num_values + nth, value_of((likeliest >> 32).to(tl.int32)) - whole)
                tl.store(tokens + to * num_values + nth, (likeliest ^ _LAST_ID) & _LAST_ID)
                ordered = tl.where(ordered == likeliest, _NOTHING, ordered)
        tl.store(line + 3, 1)
        if timed:
            tl.store(line + 2, globaltimer())


class Parts(NamedTuple):
    """Of the log-probabilities of n requests, by block of the vocabulary.

    Written before all earlier kernels have ended: it must not be memory that one of them has used.
    """

    top: Tensor
    """int64 [n, blocks, most]: the likeliest tokens."""
    best: Tensor
    """float32 [n, blocks]."""
    sums: Tensor
    """float32 [n, blocks]: of probabilities, relative to the best."""
    ranks: Tensor
    """int32 [n, blocks]: how many are better than the chosen one."""

    @classmethod
    def empty(cls, num_rows: int, width: int, logprobs: LogprobLines, device: torch.device) -> "Parts":
        """Room for it."""
        shape = num_rows, cdiv(width, triton_cuts.block_of(width))
        most_top = next_power_of_2(max(2, logprobs.values.size(2) - 1))
        kinds = (
            ((*shape, most_top), torch.int64),
            (shape, torch.float32),
            (shape, torch.float32),
            (shape, torch.int32),
        )
        return cls(*(torch.empty(size, dtype=dtype, device=device) for size, dtype in kinds))


def amend(
    logits: Tensor,
    rows: Tensor,
    places: Tensor,
    asked: Asked,
    drawn: Drawn,
    parts: Parts,
    lines: TokenLines,
    logprobs: LogprobLines,
) -> None:
    """Write the tokens of n requests over those in the newest line, and what else is to be told of them.

    Padding's row 0 writes nothing.
    """
    num_blocks, width = parts.best.size(1), logits.size(1)
    ring = lines.ring
    _amend[(num_blocks, rows.size(0))](
        logits,
        rows,
        places,
        asked.repetition,
        asked.presence,
        asked.frequency,
        asked.num_logprobs,
        *drawn.best,
        drawn.arrived,
        *parts,
        asked.generated,
        lines.last_tokens,
        ring,
        lines.counts,
        *logprobs,
        logits.stride(0),
        num_blocks,
        ring.size(1),
        ring.size(0),
        logprobs.values.size(1),
        width=width,
        block=triton_cuts.block_of(width),
        head=LINE_HEAD,
        parts_block=joined_block(num_blocks),
        most_top=parts.top.size(2),
        num_values=logprobs.values.size(2),
        timed=logits.is_cuda,
        num_warps=8,
        enable_fp_fusion=True,
        **dependent_launch.options(logits.device),
    )
