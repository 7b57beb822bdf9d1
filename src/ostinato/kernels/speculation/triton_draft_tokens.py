# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""The best token of a draft's logits, on a GPU; see `draft_tokens`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..custom_op import custom_op
from ..dependent_launch import wait_for_previous
from ..host_sizes import cdiv, next_power_of_2
from ..sampling.triton_best import joined_block, token_of_row

_BLOCK = 2048


@triton.jit(do_not_specialize=["num_blocks", "row_stride"])
def _best_of_block(
    logits, best, best_at, row_stride, num_blocks, width, block: tl.constexpr, dependent: tl.constexpr
):
    at, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    column = part * block + tl.arange(0, block)
    wait_for_previous(dependent)
    value = tl.load(logits + at * row_stride + column, column < width, other=float("-inf"))
    found, found_at = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + at * num_blocks + part, found)
    tl.store(best_at + at * num_blocks + part, part * block + found_at)


@triton.jit(
    do_not_specialize=["number", "num_drafts", "num_blocks", "width"],
    do_not_specialize_on_alignment=["rows", "drafts", "offsets"],
)
def _note_best(
    rows,
    best,
    best_at,
    offsets,
    drafts,
    ids,
    number,
    num_drafts,
    num_blocks,
    width,
    has_offsets: tl.constexpr,
    block: tl.constexpr,
    dependent: tl.constexpr,
):
    at = tl.program_id(0)
    row = tl.load(rows + at).to(tl.int64)
    wait_for_previous(dependent)
    token = token_of_row(best, best_at, at, num_blocks, width, block)
    if has_offsets:
        token += tl.load(offsets + token)
    token = tl.where(row != 0, token, 0)
    tl.store(ids + at, token)
    if row != 0:
        tl.store(drafts + row * num_drafts + number, token.to(drafts.dtype.element_ty))


@custom_op("note_best_draft", mutates_args=("drafts",))
def note_best(
    logits: Tensor, rows: Tensor, number: int, drafts: Tensor, target_offsets: Tensor | None
) -> Tensor:
    """Custom op of `draft_tokens.note_best`."""
    num_rows, width = logits.shape
    block = min(_BLOCK, next_power_of_2(width))
    num_blocks = cdiv(width, block)
    best = logits.new_empty(num_rows, num_blocks)
    best_at = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    options = dependent_launch.options(logits.device)
    _best_of_block[(num_blocks, num_rows)](
        logits,
        best,
        best_at,
        logits.stride(0),
        num_blocks,
        width,
        block=block,
        enable_fp_fusion=True,
        **options,
    )
    _note_best[(num_rows,)](
        rows,
        best,
        best_at,
        ids if target_offsets is None else target_offsets,
        drafts,
        ids,
        number,
        drafts.stride(0),
        num_blocks,
        width,
        has_offsets=target_offsets is not None,
        block=joined_block(num_blocks),
        num_warps=1,
        enable_fp_fusion=True,
        **options,
    )
    return ids


@note_best.register_fake
def _(logits: Tensor, *others: object) -> Tensor:
    return logits.new_empty(logits.size(0), dtype=torch.int64)
