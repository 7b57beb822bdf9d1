# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Tokens by their slots, in blocks of one slot each, without a sort: places follow from counts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..custom_op import custom_op
from ..host_sizes import cdiv, next_power_of_2
from .choice import TOKENS_TO_COUNT, blocks_together


@triton.jit
def slot_and_rank(blocks, ranks, block, num_blocks):
    """Returns slot and rank of a block; a negative slot and 0 if there is no such block."""
    slot = tl.load(blocks + tl.minimum(block, num_blocks - 1))
    slot = tl.where(block < num_blocks, slot, -1)
    return slot, tl.where(slot >= 0, tl.load(ranks + tl.maximum(slot, 0)), 0)


@triton.jit
def tokens_of(blocks, order, block, num_blocks, size: tl.constexpr):
    """Returns the tokens of a block, and which of them there are; of no use if there is no such block."""
    block = tl.minimum(block, num_blocks - 1)
    place = tl.load(blocks + num_blocks + block) + tl.arange(0, size)
    real = place < tl.load(blocks + 2 * num_blocks + block)
    return tl.load(order + place, mask=real, other=0).to(tl.int64), real


@triton.jit(do_not_specialize=("num_tokens", "num_blocks"))
def _group(
    slots,
    order,
    blocks,
    num_tokens,
    num_blocks,
    slots_room: tl.constexpr,
    size: tl.constexpr,
    chunk: tl.constexpr,
    blocks_room: tl.constexpr,
):
    """Every CTA counts all tokens, places a chunk of them and describes a part of the blocks."""
    program = tl.program_id(0)
    token = program * chunk + tl.arange(0, chunk)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
    each = tl.arange(0, slots_room)
    counts = tl.zeros([slots_room], tl.int32)
    before = tl.zeros([chunk], tl.int32)
    for start in range(0, num_tokens, chunk):
        other = start + tl.arange(0, chunk)
        others = tl.load(slots + other, mask=other < num_tokens, other=-1)
        counts += tl.sum((others[:, None] == each[None, :]).to(tl.int32), 0)
        is_before = (others[:, None] == slot[None, :]) & (other[:, None] < token[None, :])
        before += tl.sum(is_before.to(tl.int32), 0)
    ends = tl.cumsum(counts, 0)
    of_slot = slot[:, None] == each[None, :]
    first = tl.sum(tl.where(of_slot, (ends - counts)[None, :], 0), 1)
    tl.store(order + first + before, token, (token < num_tokens) & (slot >= 0))

    block = program * blocks_room + tl.arange(0, blocks_room)
    filled = (counts + size - 1) // size
    block_ends = tl.cumsum(filled, 0)
    block_slot = tl.sum((block_ends[None, :] <= block[:, None]).to(tl.int32), 1)
    is_there = block < tl.sum(filled, 0)
    of_block = block_slot[:, None] == each[None, :]
    number = block - tl.sum(tl.where(of_block, (block_ends - filled)[None, :], 0), 1)
    begin = tl.sum(tl.where(of_block, (ends - counts)[None, :], 0), 1) + number * size
    end = tl.minimum(begin + size, tl.sum(tl.where(of_block, ends[None, :], 0), 1))
    in_grid = block < num_blocks
    tl.store(blocks + block, tl.where(is_there, block_slot, -1), in_grid)
    tl.store(blocks + num_blocks + block, tl.where(is_there, begin, 0), in_grid)
    tl.store(blocks + 2 * num_blocks + block, tl.where(is_there, end, 0), in_grid)
    has_tokens = (counts > 0).to(tl.int32)
    number = tl.cumsum(has_tokens, 0) - 1
    is_next = (number[None, :] == block[:, None]) & (counts > 0)[None, :]
    found = tl.sum(tl.where(is_next, each[None, :] + 1, 0), 1) - 1
    tl.store(blocks + 3 * num_blocks + block, found, in_grid)


@custom_op("lora_group", result=lambda slots, num_blocks: _room(slots, num_blocks))
def group(slots: Tensor, num_slots: int, size: int, num_blocks: int) -> tuple[Tensor, Tensor]:
    """`Rows.order` and `Rows.blocks` from the slots of all tokens, blocks of `size` tokens at most."""
    order, blocks = _room(slots, num_blocks)
    num_tokens = slots.size(0)
    _group[(cdiv(num_tokens, TOKENS_TO_COUNT),)](
        slots,
        order,
        blocks,
        num_tokens,
        num_blocks,
        slots_room=max(16, next_power_of_2(num_slots)),
        size=size,
        chunk=TOKENS_TO_COUNT,
        blocks_room=blocks_together(num_tokens, num_blocks),
        num_warps=4,
        enable_fp_fusion=True,
    )
    return order, blocks


def _room(slots: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(slots), slots.new_empty(5, num_blocks)
