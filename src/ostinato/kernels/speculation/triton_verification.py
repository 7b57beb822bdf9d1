# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""The kernels at the head and at the end of a step that verifies drafts; see `verification`."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from .. import dependent_launch
from ..custom_op import custom_op
from ..dependent_launch import wait_for_previous
from ..host_sizes import cdiv, next_power_of_2
from ..sampling import triton_draw
from ..sampling.plain import PlainSettings
from ..sampling.token_lines import LINE_HEAD, TokenLines
from ..sampling.triton_draw import best_of_rows, joined_block, uniform_of
from .state import NO_TOKEN, SpecState

_BLOCK = 128


@triton.jit(
    do_not_specialize=["num_rows", "q", "num_drafts"],
    do_not_specialize_on_alignment=["rows", "lengths", "last_tokens", "drafts"],
)
def _begin_verify(
    rows,
    lengths,
    last_tokens,
    drafts,
    input_ids,
    positions,
    token_rows,
    seq_lens,
    query_starts,
    query_lens,
    began,
    num_rows,
    q,
    num_drafts,
    block: tl.constexpr,
    timed: tl.constexpr,
):
    if timed and tl.program_id(0) == 0:
        tl.store(began, globaltimer())
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < num_rows * q
    request, step = at // q, at % q
    row = tl.load(rows + request, inside, other=0)
    is_real = inside & (row != 0)
    length = tl.load(lengths + row, is_real, other=0)
    draft = tl.load(drafts + row.to(tl.int64) * num_drafts + step - 1, is_real & (step > 0), other=0)
    last = tl.load(last_tokens + row, is_real & (step == 0), other=0)
    tl.store(input_ids + at, last + draft, inside)
    tl.store(positions + at, tl.where(is_real, length + step, 0).to(tl.int64), inside)
    tl.store(token_rows + at, row, inside)
    is_first = inside & (step == 0)
    tl.store(seq_lens + request, tl.where(is_real, length + q, 1), is_first)
    tl.store(query_starts + request, at, is_first)
    tl.store(query_lens + request, tl.where(is_real, q, 0), is_first)


Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@custom_op("begin_verify", mutates_args=("began",), result=lambda rows, q: _outputs(rows, q))
def begin_verify(
    rows: Tensor, q: int, lengths: Tensor, last_tokens: Tensor, drafts: Tensor, began: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Custom op of `verification.begin_verify`."""
    outputs = _outputs(rows, q)
    num_rows = rows.size(0)
    _begin_verify[(cdiv(num_rows * q, _BLOCK),)](
        rows,
        lengths,
        last_tokens,
        drafts,
        *outputs,
        rows if began is None else began,
        num_rows,
        q,
        drafts.stride(0),
        block=_BLOCK,
        timed=rows.is_cuda and began is not None,
        enable_fp_fusion=True,
    )
    return outputs


def _outputs(rows: Tensor, q: int) -> Outputs:
    # Six tensors: outputs of a custom op must not share memory.
    count = rows.size(0)
    ids, positions = (torch.empty(count * q, dtype=torch.int64, device=rows.device) for _ in range(2))
    token_rows = torch.empty(count * q, dtype=torch.int32, device=rows.device)
    by_request = [torch.empty(count, dtype=torch.int32, device=rows.device) for _ in range(3)]
    return ids, positions, token_rows, by_request[0], by_request[1], by_request[2]


_LINES_BLOCK = 64
"""Lines of logits that a CTA looks at: requests times their tokens."""


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "q",
        "num_drafts",
        "history_width",
        "num_blocks",
        "line_length",
        "num_lines",
        "width",
    ],
    do_not_specialize_on_alignment=[
        "rows",
        "lengths",
        "last_tokens",
        "drafts",
        "num_accepted",
        "limits",
        "history",
        "seeds",
        "rates",
        "ring",
        "counts",
    ],
)
def _accept(
    rows,
    values,
    tokens,
    lengths,
    last_tokens,
    drafts,
    num_accepted,
    limits,
    history,
    seeds,
    rates,
    ring,
    counts,
    began,
    num_rows,
    q,
    num_drafts,
    history_width,
    num_blocks,
    line_length,
    num_lines,
    width,
    head: tl.constexpr,
    no_token: tl.constexpr,
    rows_block: tl.constexpr,
    steps_block: tl.constexpr,
    block: tl.constexpr,
    synthetic: tl.constexpr,
    noted: tl.constexpr,
    timed: tl.constexpr,
    dependent: tl.constexpr,
):
    request = tl.program_id(0) * rows_block + tl.arange(0, rows_block)
    inside = request < num_rows
    row = tl.load(rows + request, inside, other=0)
    is_real = row != 0
    step = tl.arange(0, steps_block)[None, :]
    wait_for_previous(dependent)
    number = tl.load(counts)
    # What was drawn: of all tokens of some requests, one after another, then as a table.
    flat = tl.arange(0, rows_block * steps_block)
    of_request, of_step = tl.program_id(0) * rows_block + flat // steps_block, flat % steps_block
    is_drawn = (of_request < num_rows) & (of_step < q)
    lines = of_step * num_rows + of_request
    token = best_of_rows(values, tokens, lines, is_drawn, num_blocks, width, block)
    token = tl.reshape(token, (rows_block, steps_block))
    length = tl.load(lengths + row)
    is_draft = inside[:, None] & (step < q - 1)
    draft = tl.load(drafts + row.to(tl.int64)[:, None] * num_drafts + step, is_draft, other=0).to(tl.int64)
    if synthetic:
        chance = uniform_of(~tl.load(seeds + row), length + 1, tl.zeros_like(length))
        agrees = chance[:, None] < tl.load(rates + step, step < q - 1, other=0.0)
    else:
        agrees = draft == token
    agrees = agrees & is_draft & (step < tl.load(limits + row)[:, None])
    accepted = tl.min(tl.where(agrees, steps_block, step), 1)
    if synthetic:
        token = tl.where(step < accepted[:, None], draft, token)
    last = tl.sum(tl.where(step == accepted[:, None], token, 0), 1)
    tl.debug_barrier()  # every thread has read the lengths
    tl.store(lengths + row, length + 1 + accepted, is_real)
    tl.store(last_tokens + row, last, is_real)
    tl.store(num_accepted + row, accepted, is_real)
    is_new = is_real[:, None] & (step <= accepted[:, None])
    if noted:
        place = length[:, None] + 1 + step
        text = history + row.to(tl.int64)[:, None] * history_width
        tl.store(text + place, token.to(tl.int32), is_new & (place < history_width))
    # To the host: the first tokens, how many there are, and the others.
    line = ring + (number % num_lines) * line_length
    first = line + head + request
    tl.store(first + num_rows, tl.where(is_real, accepted + 1, 0).to(tl.int64), inside)
    behind = tl.where(step == 0, 0, 1 + step) * num_rows
    shown = tl.where(is_new | (step == 0), token, no_token)
    tl.store(first[:, None] + behind, shown, inside[:, None] & (step < q))
    # The CTA that ends last moves the count on: by then every thread of all others has read it.
    tl.debug_barrier()
    num_ended = tl.program_id(0).to(tl.int64)
    if tl.num_programs(0) > 1:
        num_ended = tl.atomic_add(counts + 1, 1)
    if num_ended == tl.num_programs(0) - 1:
        tl.store(line, number)
        tl.store(line + 3, 0)  # not amended yet
        if timed:
            tl.store(line + 1, tl.load(began))
            tl.store(line + 2, globaltimer())
        tl.store(counts, number + 1)
        tl.store(counts + 1, 0)


@custom_op(
    "accept_best",
    mutates_args=("lengths", "last_tokens", "num_accepted", "history", "ring", "counts"),
)
def accept_best(
    rows: Tensor,
    q: int,
    values: Tensor,
    tokens: Tensor,
    width: int,
    lengths: Tensor,
    last_tokens: Tensor,
    drafts: Tensor,
    num_accepted: Tensor,
    limits: Tensor,
    history: Tensor | None,
    seeds: Tensor,
    rates: Tensor | None,
    ring: Tensor,
    counts: Tensor,
    began: Tensor,
) -> None:
    """`verification.accept`; what is drawn has the largest value in each line of `tokens` [q * R, blocks]."""
    steps_block = next_power_of_2(q)
    rows_block = max(1, _LINES_BLOCK // steps_block)
    _accept[(cdiv(rows.size(0), rows_block),)](
        rows,
        values,
        tokens,
        lengths,
        last_tokens,
        drafts,
        num_accepted,
        limits,
        rows if history is None else history,
        seeds,
        seeds if rates is None else rates,
        ring,
        counts,
        began,
        rows.size(0),
        q,
        drafts.stride(0),
        0 if history is None else history.stride(0),
        values.size(1),
        ring.size(1),
        ring.size(0),
        width,
        head=LINE_HEAD,
        no_token=NO_TOKEN,
        rows_block=rows_block,
        steps_block=steps_block,
        block=joined_block(values.size(1)),
        synthetic=rates is not None,
        noted=history is not None,
        timed=rows.is_cuda,
        enable_fp_fusion=True,
        **dependent_launch.options(rows.device),
    )


def accept(
    logits: Tensor,
    rows: Tensor,
    q: int,
    settings: PlainSettings,
    state: SpecState,
    synthetic: Tensor | None,
    lines: TokenLines,
) -> None:
    """As `verification.accept`."""
    values, tokens = triton_draw.best_of_blocks(logits, rows, *settings, verifies=True)
    accept_best(
        rows,
        q,
        values,
        tokens,
        logits.size(1),
        *state,
        settings.seeds,
        synthetic,
        lines.ring,
        lines.counts,
        lines.began,
    )
