# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""The end of a row: its token, and the log-probabilities that are told with it.

Log-probabilities are those of the raw logits. CTAs over blocks of the vocabulary find the best tokens of
each, and count those that are better than the chosen one; one of them joins it all and writes it to the host.
A token's key and id in one integer make the order: likely ones first, of equal ones the smaller id.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from ..host_sizes import cdiv, next_power_of_2
from .filters import triton_cuts
from .filters.triton_search import key_of, value_of
from .token_lines import LogprobLines

_NOTHING = tl.constexpr(-9223372036854775808)
"""Less than any token."""
_LAST_ID = tl.constexpr(2147483647)
"""Smaller ids first: their bits are turned around."""
_FEW_TOP = tl.constexpr(8)
"""Most requests ask for no more of the likeliest tokens."""


@triton.jit
def raw_block(
    x, column, asked, to, part_best, part_sum, top, width: tl.constexpr, most_top: tl.constexpr
):  # fmt: skip
    """Notes of a block of raw logits its best tokens and sums, before it is known which token was chosen."""
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


@triton.jit
def note_rank(x, logits, token, to, part_rank):
    """Counts the logits of a block that are better than that of the token."""
    better = (x > tl.load(logits + token)).to(tl.int32)
    tl.store(part_rank + to, tl.sum(better, 0))


@triton.jit
def _write_likeliest(
    top, at, asked, whole, values, tokens, num_blocks,
    few: tl.constexpr, most_top: tl.constexpr, parts_block: tl.constexpr,
):  # fmt: skip
    """Writes the `asked` likeliest tokens of all blocks, at most `few`."""
    i = tl.arange(0, parts_block * few)
    part, nth = i // few, i % few
    held = (part < num_blocks) & (nth < asked)
    ordered = tl.load(top + (at * num_blocks + part) * most_top + nth, mask=held, other=_NOTHING)
    place = tl.arange(0, few)
    found = tl.full([few], _NOTHING, tl.int64)
    for number in range(asked):
        likeliest = tl.max(ordered, 0)
        found = tl.where(place == number, likeliest, found)
        ordered = tl.where(ordered == likeliest, _NOTHING, ordered)
    tl.store(values + place, value_of((found >> 32).to(tl.int32)) - whole, place < asked)
    tl.store(tokens + place, (found ^ _LAST_ID) & _LAST_ID, place < asked)


@triton.jit
def write_row(
    logits, at, row, place, token, asked, counted, number, top, part_best, part_sum, part_rank, generated,
    last_tokens, ring, values, tokens, ranks, num_blocks, line_length, most_rows,
    width: tl.constexpr, head: tl.constexpr, parts_block: tl.constexpr, most_top: tl.constexpr,
    num_values: tl.constexpr, timed: tl.constexpr,
):  # fmt: skip
    """Writes the token to its slot, the ring entry of this number and the counts, with its logprobs.

    `logits`: the raw ones of the row.
    """
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
        values += to * num_values
        tokens += to * num_values
        tl.store(tokens, token)
        tl.store(values, tl.load(logits + token) - whole)
        if asked > _FEW_TOP:
            _write_likeliest(
                top, at, asked, whole, values + 1, tokens + 1, num_blocks, most_top, most_top, parts_block
            )
        elif asked > 0:
            _write_likeliest(
                top, at, asked, whole, values + 1, tokens + 1, num_blocks, _FEW_TOP, most_top, parts_block
            )
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
        most_top = next_power_of_2(max(_FEW_TOP.value, logprobs.values.size(2) - 1))
        kinds = (
            ((*shape, most_top), torch.int64),
            (shape, torch.float32),
            (shape, torch.float32),
            (shape, torch.int32),
        )
        return cls(*(torch.empty(size, dtype=dtype, device=device) for size, dtype in kinds))
