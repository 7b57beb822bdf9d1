# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Bias, bans, penalties and grammar of the rows that ask for them, and a draw, in one pass over the logits.

The order is that of `asking_rows.adjusted`. Everything is read from the requests' rows, and what a row does
not ask for is not read at all. For rows with filters the changed logits are left behind, with what
`filters.triton_cuts` wants to know of them.

It is a plain launch, which begins when the step's logits and plain tokens are there. So the kernels behind it
may read these, and all that is by request row, before they wait for each other.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..constants import GREEDY_BELOW
from ..dependent_launch import is_supported, let_next_start
from ..host_sizes import cdiv
from .asked import Asked
from .filters import triton_cuts
from .filters.triton_cuts import Surveyed
from .filters.triton_survey import filters_of, survey_block
from .triton_draw import noise_of

_REGISTERS = 128
"""Of a thread: a few rows never fill the GPU, and what does not fit would go through memory."""


@triton.jit
def _biased(x, column, row, num_biases, bias_ids, bias_values, start, end, most: tl.constexpr):
    """The ids of a row ascend: those of a block lie side by side."""
    i = tl.arange(0, most)
    ids = tl.load(bias_ids + row * most + i, mask=i < num_biases, other=2147483647)
    first, last = tl.sum((ids < start).to(tl.int32), 0), tl.sum((ids < end).to(tl.int32), 0)
    for j in range(first, last):
        is_it = column == tl.load(bias_ids + row * most + j)
        x = tl.where(is_it, x + tl.load(bias_values + row * most + j), x)
    return x


@triton.jit
def _penalised(x, times, in_prompt, repetition, presence, frequency):
    """As `torch_reference.apply_penalties`."""
    was_generated = times > 0
    seen = was_generated | (in_prompt != 0)
    factor = tl.where(seen, repetition, 1.0)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    return x - frequency * times.to(tl.float32) - presence * was_generated.to(tl.float32)


@triton.jit
def has_penalties(repetition, presence, frequency):
    """Tells whether earlier tokens change the logits; as `SamplingParams.has_penalties`."""
    return (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0)


@triton.jit(do_not_specialize_on_alignment=["rows", "places"])
def _adjusted_best_of_block(
    logits,
    rows,
    places,
    temperature,
    seeds,
    lengths,
    top_k,
    top_p,
    min_p,
    repetition,
    presence,
    frequency,
    num_biases,
    bias_ids,
    bias_values,
    banned,
    banned_before,
    num_logprobs,
    in_prompt,
    masks,
    generated,
    adjusted,
    group_best,
    block_best,
    block_sum,
    block_lead,
    drawn,
    drawn_at,
    arrived,
    row_stride,
    num_words,
    num_groups,
    num_blocks,
    width: tl.constexpr,
    block: tl.constexpr,
    group: tl.constexpr,
    most_biases: tl.constexpr,
    most_banned: tl.constexpr,
    has_filters: tl.constexpr,
    greedy_below: tl.constexpr,
    dependent: tl.constexpr,
):
    at, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    let_next_start(dependent)
    # All that decides what is read is asked for at once.
    row, place = tl.load(rows + at).to(tl.int64), tl.load(places + at).to(tl.int64)
    heat, biases = tl.load(temperature + row), tl.load(num_biases + row)
    again, once, each = tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row)
    seed, length, banned_until = tl.load(seeds + row), tl.load(lengths + row), tl.load(banned_before + row)
    is_filtered = False
    if has_filters:
        _, _, _, _, _, _, is_filtered = filters_of(
            rows, at, temperature, top_k, top_p, min_p, width, greedy_below
        )
    if part == 0:
        tl.store(arrived + 2 * at + tl.arange(0, 2), 0)
    groups = part * (block // group) + tl.arange(0, block // group)
    column = groups[:, None] * group + tl.arange(0, group)[None, :]
    inside = column < width
    if row != 0:
        x = tl.load(logits + place * row_stride + column, mask=inside, other=float("-inf"))
        words = tl.load(masks + row * num_words + column // 32, mask=inside, other=0)
        # Earlier tokens come from memory, mostly, like the mask: they are asked for together.
        is_penalised = has_penalties(again, once, each)
        is_counted = column < tl.where(is_penalised, width, 0)
        times = tl.load(generated + row * width + column, mask=is_counted, other=0)
        prompt = tl.load(in_prompt + row * width + column, mask=is_counted, other=0)
        if biases > 0:
            start = part * block
            x = _biased(x, column, row, biases, bias_ids, bias_values, start, start + block, most_biases)
        if length < banned_until:
            for j in tl.static_range(most_banned):
                x = tl.where(column == tl.load(banned + row * most_banned + j), float("-inf"), x)
        if is_penalised:
            x = _penalised(x, times, prompt, again, once, each)
        x = tl.where(((words >> (column % 32)) & 1) != 0, x, float("-inf"))
        if is_filtered:
            tl.store(adjusted + at * width + column, x, mask=inside)
            survey_block(
                x, at, part, heat, group_best, block_best, block_sum, block_lead, num_groups, num_blocks,
                block // group,
            )  # fmt: skip
        if heat >= greedy_below:
            x += heat * noise_of(seed, length, column)
        of_groups, within = tl.max(x, 1, return_indices=True, return_indices_tie_break_left=True)
        best, best_group = tl.max(of_groups, 0, return_indices=True, return_indices_tie_break_left=True)
        here = tl.arange(0, block // group) == best_group
        token = part * block + best_group * group + tl.sum(tl.where(here, within, 0), 0)
        tl.store(drawn + at * num_blocks + part, best)
        tl.store(drawn_at + at * num_blocks + part, token)


class Drawn(NamedTuple):
    """A draw for n requests before anything is filtered, and what the kernels behind it need."""

    best: tuple[Tensor, Tensor]
    """float32 and int32 [n, blocks]: the best value in each block of the vocabulary, and its token."""
    arrived: Tensor
    """int32 [n, 2]: zeros, for kernels to count their CTAs with: those of `triton_amend`, which leaves a
    zero to `triton_redraw`; and how often those of `triton_find_cuts` met."""
    logits: Tensor
    """float32 [n, vocab]: of rows with filters, and only there."""
    surveyed: Surveyed
    """Of these."""

    @property
    def num_blocks(self) -> int:
        """Returns the blocks of a row."""
        return self.best[0].size(1)


def draw_adjusted(logits: Tensor, rows: Tensor, places: Tensor, asked: Asked, *, has_filters: bool) -> Drawn:
    """Draw for n requests; see `asking_rows.sample_asking`."""
    num_rows, width, device = rows.size(0), logits.size(1), logits.device
    block, group = triton_cuts.block_of(width), triton_cuts.group_of()
    num_blocks = cdiv(width, block)
    drawn = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device)
    drawn_at = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device)
    arrived = torch.empty(num_rows, 2, dtype=torch.int32, device=device)
    surveyed = Surveyed.empty(num_rows if has_filters else 0, width, device)
    adjusted = torch.empty(num_rows if has_filters else 0, width, dtype=torch.float32, device=device)
    _adjusted_best_of_block[(num_blocks, num_rows)](
        logits,
        rows,
        places,
        *asked._replace(in_prompt=asked.in_prompt.view(torch.uint8)),
        adjusted,
        *surveyed,
        drawn,
        drawn_at,
        arrived,
        logits.stride(0),
        asked.masks.size(1),
        cdiv(width, group),
        num_blocks,
        width=width,
        block=block,
        group=group,
        most_biases=asked.bias_ids.size(1),
        most_banned=asked.banned.size(1),
        has_filters=has_filters,
        greedy_below=GREEDY_BELOW,
        num_warps=8,
        enable_fp_fusion=True,
        maxnreg=_REGISTERS,
        dependent=is_supported(device),
    )
    return Drawn((drawn, drawn_at), arrived, adjusted, surveyed)
