# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Attention of single tokens: one program per token, KV head and part of the context.

    rows of the tile      the query heads that share the KV head, padded to what a tensor core takes
    parts of the context  | split 0 | split 1 | ...     equal numbers of key blocks of the real context

The number of splits follows from the rung, so that a small batch fills the GPU; how far each reaches follows
from the position on the device. A split with nothing to do returns at once; `_combine` joins the others.
With one split in use there is nothing to join and the result is stored directly.

A token's row and position are all there is to know: padded tokens (row 0, position 0) see themselves only.

`fused` starts from the rows of the QKV projection: queries and the new key are normalised and rotated here,
the new key and value stored, and attended to from registers, so no program reads what another one writes.

With `has_prefix` a context begins behind the prefix that all requests share, which `triton_cascade` reads for
all of them at once: every split then leaves its part for that to join, and the first one its queries.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..dependent_launch import wait_for_previous
from .batch import PAGE_SIZE
from .decode_tiles import MAX_SPLITS, DecodeTile, decode_tile, num_splits_of
from .heads import HeadPreparation
from .triton_tiles import (
    INDEX_BUFFERS,
    LOG2_E,
    keys_and_values,
    load_heads,
    load_norm,
    load_turn,
    turned,
)

# tl.dot wants 16 rows at least.
_MIN_TILE_ROWS = 16


@triton.jit
def split_range(
    position,
    prefix_len,
    split,
    num_splits,
    fused: tl.constexpr,
    window: tl.constexpr,
    key_block: tl.constexpr,
    least_blocks: tl.constexpr,
):
    """(begin, end, splits in use): the cached positions behind the prefix that a split attends to."""
    end_cached = position + (0 if fused else 1)
    first = prefix_len
    if window > 0:
        first = tl.maximum(first, position - window + 1) // key_block * key_block
    blocks = tl.maximum(tl.cdiv(end_cached - first, key_block), 1)
    per_split = tl.maximum(tl.cdiv(blocks, num_splits), least_blocks)
    begin = first + split * per_split * key_block
    return begin, tl.minimum(begin + per_split * key_block, end_cached), tl.cdiv(blocks, per_split)


@triton.jit(do_not_specialize=("num_splits", "num_parts"), do_not_specialize_on_alignment=INDEX_BUFFERS)
def _decode(
    rows,
    q_norm,
    k_norm,
    rotary,
    k_cache,
    v_cache,
    out,
    q_out,
    partial,
    partial_lse,
    page_table,
    token_rows,
    positions,
    prefix_lens,
    scale,
    eps,
    token_stride,
    page_table_stride,
    num_splits,
    num_parts,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    window: tl.constexpr,
    fused: tl.constexpr,
    has_norm: tl.constexpr,
    has_prefix: tl.constexpr,
    is_split: tl.constexpr,
    group_block: tl.constexpr,
    key_block: tl.constexpr,
    least_blocks: tl.constexpr,
    dim_block: tl.constexpr,
    ahead: tl.constexpr,
    dependent: tl.constexpr,
):
    kv_head, split = tl.program_id(0) % num_kv_heads, tl.program_id(0) // num_kv_heads
    token = tl.program_id(1).to(tl.int64)
    position = tl.load(positions + token).to(tl.int32)
    table_row = tl.load(token_rows + token).to(tl.int64)
    pages = page_table + table_row * page_table_stride
    prefix_len = tl.load(prefix_lens + table_row) if has_prefix else 0
    begin, end, in_use = split_range(
        position, prefix_len, split, num_splits, fused, window, key_block, least_blocks
    )
    if (split > 0) & (begin >= end):
        return
    if ahead:
        k_tile, v_tile = keys_and_values(
            k_cache, v_cache, pages, begin, end, kv_head,
            num_kv_heads, head_dim, page_size, key_block, dim_block,
        )  # fmt: skip
    group: tl.constexpr = num_heads // num_kv_heads
    in_group = tl.arange(0, group_block)
    real = in_group < group
    head = kv_head * group + in_group
    dims = tl.arange(0, dim_block)
    in_head = dims < head_dim
    row = rows + token * token_stride
    best = tl.full([group_block], float("-inf"), tl.float32)
    total = tl.zeros([group_block], tl.float32)
    acc = tl.zeros([group_block, dim_block], tl.float32)
    if fused:
        cos, sin = load_turn(rotary, position + tl.zeros([1], tl.int32), head_dim, dim_block)
        if has_norm:
            q_weight, q_weight_y = load_norm(q_norm, head_dim, dim_block)
            k_weight, k_weight_y = load_norm(k_norm, head_dim, dim_block)
        else:
            q_weight, q_weight_y, k_weight, k_weight_y = None, None, None, None
        page = tl.load(pages + position // page_size).to(tl.int64)
        place = ((page * page_size + position % page_size) * num_kv_heads + kv_head) * head_dim
        wait_for_previous(dependent)
        # All loads before the first use of any: their latencies overlap.
        first = (split + tl.zeros([1], tl.int32)) == 0
        k_head = row + (num_heads + kv_head) * head_dim
        q_x, q_y = load_heads(row + head * head_dim, real, head_dim, dim_block)
        k_x, k_y = load_heads(k_head + tl.zeros([1], tl.int32), first, head_dim, dim_block)
        new_v = tl.load(
            k_head + num_kv_heads * head_dim + dims[None, :],
            mask=first[:, None] & in_head[None, :],
            other=0.0,
        ).to(v_cache.dtype.element_ty)
        q_tile = turned(q_x, q_y, q_weight, q_weight_y, cos, sin, eps, head_dim, has_norm)
        q_tile = q_tile.to(k_cache.dtype.element_ty)
        new_k = turned(k_x, k_y, k_weight, k_weight_y, cos, sin, eps, head_dim, has_norm)
        new_k = new_k.to(k_cache.dtype.element_ty)
        if split == 0:
            tl.store(k_cache + place + dims[None, :], new_k, in_head[None, :])
            tl.store(v_cache + place + dims[None, :], new_v, in_head[None, :])
            if has_prefix:
                queries = q_out + (token * num_heads + head)[:, None] * head_dim + dims[None, :]
                tl.store(queries, q_tile, real[:, None] & in_head[None, :])
            best = tl.sum(q_tile.to(tl.float32) * new_k.to(tl.float32), 1) * scale
            total += 1.0
            acc += new_v.to(tl.float32)
    else:
        wait_for_previous(dependent)
        q_tile = tl.load(
            row + head[:, None] * head_dim + dims[None, :], mask=real[:, None] & in_head[None, :], other=0.0
        )

    for start in range(begin, end, key_block):
        if ahead:
            next_k, next_v = keys_and_values(
                k_cache, v_cache, pages, start + key_block, end, kv_head,
                num_kv_heads, head_dim, page_size, key_block, dim_block,
            )  # fmt: skip
        else:
            k_tile, v_tile = keys_and_values(
                k_cache, v_cache, pages, start, end, kv_head,
                num_kv_heads, head_dim, page_size, key_block, dim_block,
            )  # fmt: skip
        key = start + tl.arange(0, key_block)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        visible = key < end
        if window > 0:
            visible = visible & (key > position - window)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # A window may hide a whole block: -inf minus -inf would be NaN.
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - shift[:, None])
        faded = tl.exp2(best - shift)
        total = total * faded + tl.sum(weights, 1)
        acc = acc * faded[:, None] + tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")
        best = new_best
        if ahead:
            k_tile, v_tile = next_k, next_v

    result = acc / total[:, None]
    place = token * num_heads + head
    mask = real[:, None] & in_head[None, :]
    if is_split:
        part = place * num_parts + split
        # Behind a prefix there is always something to join.
        least_in_use: tl.constexpr = 0 if has_prefix else 1
        several = in_use + tl.zeros([group_block], tl.int32) > least_in_use
        tl.store(partial + part[:, None] * head_dim + dims[None, :], result, mask & several[:, None])
        tl.store(partial_lse + part, best + tl.log2(total), real & several)
        mask = mask & ~several[:, None]
    tl.store(out + place[:, None] * head_dim + dims[None, :], result.to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=("num_splits",), do_not_specialize_on_alignment=INDEX_BUFFERS)
def _combine(
    partial,
    partial_lse,
    out,
    positions,
    num_splits,
    head_dim: tl.constexpr,
    num_heads: tl.constexpr,
    window: tl.constexpr,
    fused: tl.constexpr,
    key_block: tl.constexpr,
    least_blocks: tl.constexpr,
    split_block: tl.constexpr,
    dim_block: tl.constexpr,
    dependent: tl.constexpr,
):
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(positions + token).to(tl.int32)
    # Only these splits were written for this token; memory of the others holds anything.
    _, _, in_use = split_range(position, 0, 0, num_splits, fused, window, key_block, least_blocks)
    splits = tl.arange(0, split_block)
    dims = tl.arange(0, dim_block)
    written, in_head = splits < in_use, dims < head_dim
    places = (token * num_heads + head) * num_splits + splits
    # Also by programs with nothing to join: the next kernel waits for this one only.
    wait_for_previous(dependent)
    if in_use == 1:
        return
    lse = tl.load(partial_lse + places, mask=written, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))
    parts = tl.load(
        partial + places[:, None] * head_dim + dims[None, :],
        mask=written[:, None] & in_head[None, :],
        other=0.0,
    )
    result = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + (token * num_heads + head) * head_dim + dims, result.to(out.dtype.element_ty), in_head)


def launch_decode(
    rows: Tensor,
    out: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    heads: HeadPreparation | None,
    *,
    num_heads: int,
    num_splits: int,
    scale: float,
    sliding_window: int,
    tile: DecodeTile,
    prefix_lens: Tensor | None = None,
) -> None:
    """Queue the kernel: into `out`, or into the partials when there are several splits.

    Behind prefixes: queries into `out`, the rest into the first of the partials [T, Hq, parts, D].
    """
    num_tokens, head_dim, num_kv_heads = rows.size(0), k_cache.size(3), k_cache.size(2)
    group_block = max(_MIN_TILE_ROWS, triton.next_power_of_2(num_heads // num_kv_heads))
    _decode[(num_kv_heads * num_splits, num_tokens)](
        rows,
        heads.q_norm if heads and heads.q_norm is not None else rows,
        heads.k_norm if heads and heads.k_norm is not None else rows,
        heads.rotary if heads else rows,
        k_cache,
        v_cache,
        out,
        out,
        partial,
        partial_lse,
        page_table,
        token_rows,
        positions,
        token_rows if prefix_lens is None else prefix_lens,
        scale * LOG2_E,
        heads.eps if heads else 0.0,
        rows.stride(0),
        page_table.stride(0),
        num_splits,
        num_splits if prefix_lens is None else partial.size(2),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=PAGE_SIZE,
        window=sliding_window,
        fused=heads is not None,
        has_norm=heads is not None and heads.q_norm is not None,
        has_prefix=prefix_lens is not None,
        is_split=num_splits > 1 or prefix_lens is not None,
        group_block=group_block,
        key_block=tile.key_block,
        least_blocks=tile.least_blocks,
        dim_block=max(16, triton.next_power_of_2(head_dim)),
        ahead=tile.ahead,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
        **dependent_launch.options(rows.device),
    )


def launch_combine(
    partial: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    positions: Tensor,
    *,
    sliding_window: int,
    fused: bool,
    tile: DecodeTile,
) -> None:
    """Join partials [T, Hq, splits, D] into `out` [T, Hq, D]."""
    num_tokens, num_heads, num_splits, head_dim = partial.shape
    _combine[(num_heads, num_tokens)](
        partial,
        partial_lse,
        out,
        positions,
        num_splits,
        head_dim=head_dim,
        num_heads=num_heads,
        window=sliding_window,
        fused=fused,
        key_block=tile.key_block,
        least_blocks=tile.least_blocks,
        split_block=MAX_SPLITS,
        dim_block=triton.next_power_of_2(head_dim),
        num_warps=4,
        enable_fp_fusion=True,
        **dependent_launch.options(out.device),
    )


def attend_tokens(
    rows: Tensor,
    heads: HeadPreparation | None,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    num_heads: int,
    scale: float,
    sliding_window: int,
) -> Tensor:
    """Attention [T, Hq, D] of tokens whose heads, or QKV rows if there is preparation, are `rows`."""
    num_tokens, num_kv_heads, head_dim = rows.size(0), k_cache.size(2), k_cache.size(3)
    out = rows.new_empty(num_tokens, num_heads, head_dim)
    if not num_tokens:
        return out
    tile, num_splits = decode_tile(rows.dtype, num_tokens), num_splits_of(num_tokens, num_kv_heads)
    partial = partial_lse = out
    if num_splits > 1:
        sizes = (num_tokens, num_heads, num_splits)
        partial = torch.empty(*sizes, head_dim, dtype=torch.float32, device=rows.device)
        partial_lse = torch.empty(sizes, dtype=torch.float32, device=rows.device)
    launch_decode(
        rows,
        out,
        partial,
        partial_lse,
        k_cache,
        v_cache,
        page_table,
        token_rows,
        positions,
        heads,
        num_heads=num_heads,
        num_splits=num_splits,
        scale=scale,
        sliding_window=sliding_window,
        tile=tile,
    )
    if num_splits > 1:
        fused = heads is not None
        launch_combine(
            partial, partial_lse, out, positions, sliding_window=sliding_window, fused=fused, tile=tile
        )
    return out
