# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Tokens times the first matrix of their adapters: from the width of a layer to a few ranks.

A CTA takes a block of tokens that have the same slot, 16 ranks of one part, and a share of the columns.
The weights of its first columns are on their way before it waits for the previous kernel. Sums of the shares
lie beside each other, and who reads them adds them in order:

    shrunk   float32 [splits, T, parts * room]

Undefined for tokens without an adapter and, beyond a multiple of 16, for ranks that an adapter has not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..custom_op import custom_op
from ..dependent_launch import wait_for_previous
from .adapter_rows import ToShrink
from .choice import division, programs_for_blocks
from .stack import RANKS_TOGETHER
from .triton_grouping import slot_and_rank, tokens_of


@triton.jit
def _add_product(acc, x, token, real, norm_weight, w, k, in_features: tl.constexpr, norm: tl.constexpr):
    """Sums of w [ranks, columns] times columns k of the tokens' rows, which begin at places `token`."""
    in_row = k < in_features
    if norm:
        g = tl.load(norm_weight + k, mask=in_row, other=0.0).to(tl.float32)
    if token.shape[0] == 1:
        v = tl.load(x + tl.sum(token, 0) + k, mask=in_row, other=0.0)
        if norm:
            v = (v.to(tl.float32) * g).to(v.dtype)
        acc += tl.sum(w.to(tl.float32) * v.to(tl.float32)[None, :], 1)[None, :]
    else:
        v = tl.load(x + token[:, None] + k[None, :], mask=real[:, None] & in_row[None, :], other=0.0)
        if norm:
            v = (v.to(tl.float32) * g[None, :]).to(v.dtype)
        acc = tl.dot(v, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=("num_tokens", "num_blocks"))
def _shrink(
    x,
    norm_weight,
    a,
    ranks,
    order,
    blocks,
    shrunk,
    num_tokens,
    num_blocks,
    x_stride,
    in_features: tl.constexpr,
    width: tl.constexpr,
    room: tl.constexpr,
    tokens: tl.constexpr,
    together: tl.constexpr,
    columns: tl.constexpr,
    splits: tl.constexpr,
    norm: tl.constexpr,
    dependent: tl.constexpr,
):
    share: tl.constexpr = (in_features + splits * columns - 1) // (splits * columns) * columns
    even: tl.constexpr = in_features % (splits * columns) == 0
    block, first_row, split = tl.program_id(0), tl.program_id(1) * together, tl.program_id(2)
    first_rank = first_row % room
    row = first_row + tl.arange(0, together)
    k = split * share + tl.arange(0, columns)
    slot, rank = slot_and_rank(blocks, ranks, block, num_blocks)
    weights = a + (tl.maximum(slot, 0).to(tl.int64) * width + row[:, None]) * in_features + k[None, :]
    w = tl.load(weights, mask=(k < tl.where(first_rank < rank, in_features, 0))[None, :], other=0.0)
    token, real = tokens_of(blocks, order, block, num_blocks, tokens)
    wait_for_previous(dependent)
    # Blocks without tokens are the last ones. (Not a `while`: Triton 3.6 fails on one that carries weights.)
    for before in range(block, tl.where(slot >= 0, num_blocks, 0), tl.num_programs(0)):
        acc = tl.zeros([tokens, together], tl.float32)
        acc = _add_product(acc, x, token * x_stride, real, norm_weight, w, k, in_features, norm)
        if share > columns:
            rows_of_a = a + (slot.to(tl.int64) * width + row[:, None]) * in_features + k[None, :]
            # An adapter that has no such ranks here leaves zeros, which nobody reads.
            for start in range(columns, tl.where(first_rank < rank, share, 0), columns):
                if even:
                    w = tl.load(rows_of_a + start)
                else:
                    w = tl.load(rows_of_a + start, mask=(start + k < in_features)[None, :], other=0.0)
                acc = _add_product(
                    acc, x, token * x_stride, real, norm_weight, w, start + k, in_features, norm
                )
        target = shrunk + (split * num_tokens + token)[:, None] * width + row[None, :]
        tl.store(target, acc, real[:, None])
        block = before + tl.num_programs(0)
        token, real = tokens_of(blocks, order, block, num_blocks, tokens)
        slot, rank = slot_and_rank(blocks, ranks, block, num_blocks)
        weights = a + (tl.maximum(slot, 0).to(tl.int64) * width + row[:, None]) * in_features + k[None, :]
        w = tl.load(weights, mask=(k < tl.where(first_rank < rank, in_features, 0))[None, :], other=0.0)


@custom_op("lora_shrink", result=lambda operands: room_for_sums(operands.x, operands.a))
def shrink(operands: ToShrink) -> Tensor:
    """Multiplies rows x [T, in], times `norm_weight` if that is given, with `a` of their slots."""
    shrunk = room_for_sums(operands.x, operands.a)
    launch_shrink(operands, shrunk)
    return shrunk


def launch_shrink(operands: ToShrink, shrunk: Tensor, *, plain: bool = False) -> None:
    """Queues the kernel, as a plain launch if asked."""
    x, norm_weight, a, room, ranks, order, blocks = operands
    assert x.stride(1) == 1, "columns lie beside each other"
    how, num_blocks = division(*x.shape), blocks.size(1)
    programs = programs_for_blocks(x.size(0), a.size(0))
    _shrink[(programs, a.size(1) // RANKS_TOGETHER, how.splits)](
        x,
        x if norm_weight is None else norm_weight,
        a,
        ranks,
        order,
        blocks,
        shrunk,
        x.size(0),
        num_blocks,
        x.stride(0),
        in_features=x.size(1),
        width=a.size(1),
        room=room,
        tokens=how.tokens,
        together=RANKS_TOGETHER,
        columns=how.columns,
        splits=how.splits,
        norm=norm_weight is not None,
        num_warps=4,
        num_stages=min(how.num_stages, 3 if x.element_size() == 2 else 2),
        enable_fp_fusion=True,
        **dependent_launch.options(x.device, plain=plain),
    )


def room_for_sums(x: Tensor, a: Tensor) -> Tensor:
    """Allocates what `launch_shrink` fills."""
    return x.new_empty(division(*x.shape).splits, x.size(0), a.size(1), dtype=torch.float32)
