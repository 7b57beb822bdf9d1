# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""What `triton_shrink` left, times the second matrix of the adapters, added to a product that is there.

A CTA takes a block of tokens that have the same slot and some rows of one part. Every result belongs to
one CTA.
"""

import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..custom_op import custom_op
from ..dependent_launch import wait_for_previous
from ..host_sizes import cdiv
from .choice import programs_for_blocks, tokens_together
from .stack import RANKS_TOGETHER
from .triton_grouping import slot_and_rank, tokens_of

_ROWS = 128


@triton.jit(do_not_specialize=("num_tokens", "num_blocks"))
def _expand(
    shrunk,
    b,
    ranks,
    order,
    blocks,
    product,
    num_tokens,
    num_blocks,
    out_features: tl.constexpr,
    second: tl.constexpr,
    third: tl.constexpr,
    width: tl.constexpr,
    room: tl.constexpr,
    splits: tl.constexpr,
    tokens: tl.constexpr,
    together: tl.constexpr,
    rows: tl.constexpr,
    is_new: tl.constexpr,
    dependent: tl.constexpr,
):
    tiles: tl.constexpr = (second + rows - 1) // rows
    more_tiles: tl.constexpr = tiles + (third - second + rows - 1) // rows
    block, tile = tl.program_id(0), tl.program_id(1)
    part = (tile >= tiles).to(tl.int32) + (tile >= more_tiles).to(tl.int32)
    begin = tl.where(part == 0, 0, tl.where(part == 1, second, third))
    end = tl.where(part == 0, second, tl.where(part == 1, third, out_features))
    first_tile = tl.where(part == 0, 0, tl.where(part == 1, tiles, more_tiles))
    n = begin + (tile - first_tile) * rows + tl.arange(0, rows)
    in_part = n < end
    slot, rank = slot_and_rank(blocks, ranks, block, num_blocks)
    r = tl.arange(0, together)
    weights = b + (tl.maximum(slot, 0).to(tl.int64) * out_features + n[:, None]) * room + r[None, :]
    w = tl.load(weights, mask=(n < tl.where(rank > 0, end, 0))[:, None], other=0.0)
    token, real = tokens_of(blocks, order, block, num_blocks, tokens)
    wait_for_previous(dependent)
    # Blocks without tokens are the last ones. (Not a `while`: Triton 3.6 fails on one that carries weights.)
    for before in range(block, tl.where(slot >= 0, num_blocks, 0), tl.num_programs(0)):
        source = shrunk + token[:, None] * width + part * room + r[None, :]
        target = product + token[:, None] * out_features + n[None, :]
        inside = real[:, None] & in_part[None, :]
        acc = tl.zeros([tokens, rows], tl.float32)
        for start in range(0, rank, together):
            if room > together:
                rows_of_b = b + (slot.to(tl.int64) * out_features + n[:, None]) * room + r[None, :]
                w = tl.load(rows_of_b + start, mask=in_part[:, None], other=0.0)
            v = tl.zeros([tokens, together], tl.float32)
            for split in tl.static_range(splits):
                v += tl.load(source + split * num_tokens * width + start, mask=real[:, None], other=0.0)
            acc = tl.dot(v.to(w.dtype), tl.trans(w), acc, input_precision="ieee")
        if not is_new:
            acc += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, acc.to(product.dtype.element_ty), inside)
        block = before + tl.num_programs(0)
        token, real = tokens_of(blocks, order, block, num_blocks, tokens)
        slot, rank = slot_and_rank(blocks, ranks, block, num_blocks)
        weights = b + (tl.maximum(slot, 0).to(tl.int64) * out_features + n[:, None]) * room + r[None, :]
        w = tl.load(weights, mask=(n < tl.where(rank > 0, end, 0))[:, None], other=0.0)


@custom_op("lora_expand", mutates_args=("product",))
def expand(
    shrunk: Tensor,
    b: Tensor,
    second: int,
    third: int,
    ranks: Tensor,
    order: Tensor,
    blocks: Tensor,
    product: Tensor,
    is_new: bool,
    plain: bool = False,
) -> None:
    """Add to dense rows `product` [T, out], or, `is_new`, put there; other rows stay as they are.

    `second`, `third`: the first rows of these parts of `b`, or `out`. `plain`: as a plain launch.
    """
    assert product.is_contiguous(), "dense rows"
    num_tokens, out_features = product.shape
    sizes = second, third - second, out_features - third
    programs = programs_for_blocks(num_tokens, b.size(0))
    _expand[(programs, sum(cdiv(size, _ROWS) for size in sizes))](
        shrunk,
        b,
        ranks,
        order,
        blocks,
        product,
        num_tokens,
        blocks.size(1),
        out_features=out_features,
        second=second,
        third=third,
        width=shrunk.size(2),
        room=b.size(2),
        splits=shrunk.size(0),
        tokens=max(16, tokens_together(num_tokens)),
        together=RANKS_TOGETHER,
        rows=_ROWS,
        is_new=is_new,
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=True,
        **dependent_launch.options(product.device, plain=plain),
    )
