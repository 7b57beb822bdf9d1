# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Attention of single tokens from the QKV projection: one CTA per token, KV head and part of the context.

    heads of the tile     the query heads that share the KV head, padded to what a tensor core takes
    parts of the context  | split 0 | split 1 | ...     equal numbers of key blocks of the real context

The number of splits follows from the rung, so that a small batch fills the GPU; how far each reaches follows
from the position on the device. A split with nothing to do returns at once; `_join` joins the others. With
one split in use there is nothing to join and the result is stored directly.

Queries and the new key are normalised and rotated here, the new key and value stored, and attended to from
registers, so no CTA reads what another one writes. A token's row of the page table and its position are
all there is to know: padded tokens (row 0, position 0) see themselves only.

Requests that share a prefix have it read once for all of them:

    positions           0                    prefix_len              position
    request a           | - - - - - - - - - - - - |--- its own ----------|
    request b           | - - shared pages  - - - |--- its own ---|
    who reads them      `triton_prefix`           `_decode`, one CTA per token
    parts of a context  | split | split | ...     | split | ...

`_decode` then begins behind the prefix, and leaves all its parts and its queries; `_join` joins both kinds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..dependent_launch import wait_for_previous
from ..gpu import gpu_of
from ..host_sizes import next_power_of_2
from .batch import PAGE_SIZE, HeadPreparation, PagedTokens
from .choice import decode_tile, num_splits_of, prefix_splits_of, prefix_tile
from .triton_prefix import attend_prefix, prefix_range
from .triton_tiles import (
    INDEX_BUFFERS,
    LOG2_E,
    PARTS_AT_A_TIME,
    fold_in,
    fold_parts,
    keys_and_values,
    load_heads,
    load_norm,
    load_turn,
    turned,
)

BUFFERS = (*INDEX_BUFFERS, "prefix_lens")
# tl.dot wants so many at least.
_LEAST_TILE_HEADS = 16


@triton.jit
def split_range(
    position,
    prefix_len,
    split,
    num_splits,
    window: tl.constexpr,
    key_block: tl.constexpr,
    least_blocks: tl.constexpr,
):
    """(begin, end, splits in use): the positions behind the prefix that a split reads, all before its own."""
    first = prefix_len
    if window > 0:
        first = tl.maximum(first, position - window + 1) // key_block * key_block
    blocks = tl.maximum(tl.cdiv(position - first, key_block), 1)
    per_split = tl.maximum(tl.cdiv(blocks, num_splits), least_blocks)
    begin = first + split * per_split * key_block
    return begin, tl.minimum(begin + per_split * key_block, position), tl.cdiv(blocks, per_split)


@triton.jit(do_not_specialize=("num_splits", "num_parts"), do_not_specialize_on_alignment=BUFFERS)
def _decode(
    qkv,
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
    begin, end, in_use = split_range(position, prefix_len, split, num_splits, window, key_block, least_blocks)
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
    of_token = qkv + token * token_stride
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
    k_head = of_token + (num_heads + kv_head) * head_dim
    q_x, q_y = load_heads(of_token + head * head_dim, real, head_dim, dim_block)
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
    best = tl.full([group_block], float("-inf"), tl.float32)
    total = tl.zeros([group_block], tl.float32)
    acc = tl.zeros([group_block, dim_block], tl.float32)
    if split == 0:
        tl.store(k_cache + place + dims[None, :], new_k, in_head[None, :])
        tl.store(v_cache + place + dims[None, :], new_v, in_head[None, :])
        if has_prefix:
            queries = q_out + (token * num_heads + head)[:, None] * head_dim + dims[None, :]
            tl.store(queries, q_tile, real[:, None] & in_head[None, :])
        best = tl.sum(q_tile.to(tl.float32) * new_k.to(tl.float32), 1) * scale
        total += 1.0
        acc += new_v.to(tl.float32)

    last = position + tl.zeros([group_block], tl.int32)
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
        best, total, acc = fold_in(
            q_tile, k_tile, v_tile, key, last, end, best, total, acc, scale, window, True
        )
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


@triton.jit(do_not_specialize=("num_splits", "num_prefix_splits"), do_not_specialize_on_alignment=BUFFERS)
def _join(
    partial,
    partial_lse,
    out,
    token_rows,
    positions,
    prefix_lens,
    num_splits,
    num_prefix_splits,
    head_dim: tl.constexpr,
    num_heads: tl.constexpr,
    window: tl.constexpr,
    has_prefix: tl.constexpr,
    key_block: tl.constexpr,
    least_blocks: tl.constexpr,
    prefix_key_block: tl.constexpr,
    prefix_least_blocks: tl.constexpr,
    part_block: tl.constexpr,
    dim_block: tl.constexpr,
    dependent: tl.constexpr,
):
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(positions + token).to(tl.int32)
    prefix_len = tl.load(prefix_lens + tl.load(token_rows + token).to(tl.int64)) if has_prefix else 0
    # Only these parts were written for this token; memory of the others holds anything.
    _, _, in_use = split_range(position, prefix_len, 0, num_splits, window, key_block, least_blocks)
    place = token * num_heads + head
    first = place * (num_splits + num_prefix_splits)
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([dim_block], tl.float32)
    # Also by CTAs with nothing to join: the next kernel waits for this one only.
    wait_for_previous(dependent)
    if (not has_prefix) & (in_use == 1):
        return
    best, total, acc = fold_parts(
        partial, partial_lse, first, in_use, best, total, acc, head_dim, part_block, dim_block
    )
    if has_prefix:
        _, _, prefix_in_use = prefix_range(
            prefix_len, 0, num_prefix_splits, prefix_key_block, prefix_least_blocks
        )
        best, total, acc = fold_parts(
            partial, partial_lse, first + num_splits, prefix_in_use,
            best, total, acc, head_dim, part_block, dim_block,
        )  # fmt: skip
    dims = tl.arange(0, dim_block)
    tl.store(out + place * head_dim + dims, (acc / total).to(out.dtype.element_ty), dims < head_dim)


def attend_tokens(
    qkv: Tensor,
    heads: HeadPreparation,
    tokens: PagedTokens,
    prefix_lens: Tensor | None,
    num_heads: int,
    scale: float,
    sliding_window: int,
    max_context: int,
) -> Tensor:
    """Attention [T, Hq, D] of tokens whose QKV projection is `qkv`, their keys and values stored."""
    k_cache, v_cache, page_table, token_rows, positions = tokens
    num_tokens, num_kv_heads, head_dim = qkv.size(0), k_cache.size(2), k_cache.size(3)
    out = qkv.new_empty(num_tokens, num_heads, head_dim)
    if not num_tokens:
        return out
    has_prefix = prefix_lens is not None
    group = num_heads // num_kv_heads
    gpu = gpu_of(qkv.device)
    tile = decode_tile(qkv.dtype, num_tokens, head_dim)
    over_prefix = prefix_tile(qkv.dtype, num_tokens, group, head_dim, gpu)
    splits, prefix_splits = num_splits_of(num_tokens, num_kv_heads), 0
    if has_prefix:
        prefix_splits = prefix_splits_of(over_prefix, num_tokens, num_heads, num_kv_heads, max_context, gpu)
    is_split = splits + prefix_splits > 1
    partial = partial_lse = out
    if is_split:
        sizes = (num_tokens, num_heads, splits + prefix_splits)
        partial = torch.empty(*sizes, head_dim, dtype=torch.float32, device=qkv.device)
        partial_lse = torch.empty(sizes, dtype=torch.float32, device=qkv.device)
    queries = torch.empty_like(out) if has_prefix else out
    lens = token_rows if prefix_lens is None else prefix_lens
    overlapping = dependent_launch.options(qkv.device)
    _decode[(num_kv_heads * splits, num_tokens)](
        qkv,
        qkv if heads.q_norm is None else heads.q_norm,
        qkv if heads.k_norm is None else heads.k_norm,
        heads.rotary,
        k_cache,
        v_cache,
        out,
        queries,
        partial,
        partial_lse,
        page_table,
        token_rows,
        positions,
        lens,
        scale * LOG2_E,
        heads.eps,
        qkv.stride(0),
        page_table.stride(0),
        splits,
        splits + prefix_splits,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=PAGE_SIZE,
        window=0 if has_prefix else sliding_window,
        has_norm=heads.q_norm is not None,
        has_prefix=has_prefix,
        is_split=is_split,
        group_block=max(_LEAST_TILE_HEADS, next_power_of_2(group)),
        dim_block=max(16, next_power_of_2(head_dim)),
        enable_fp_fusion=True,
        **vars(tile),
        **overlapping,
    )
    if prefix_lens is not None:
        caches = (k_cache, v_cache, page_table, token_rows, prefix_lens)
        attend_prefix(
            queries, partial, partial_lse, *caches, num_splits=prefix_splits, scale=scale, tile=over_prefix
        )
    if is_split:
        _join[(num_heads, num_tokens)](
            partial,
            partial_lse,
            out,
            token_rows,
            positions,
            lens,
            splits,
            prefix_splits,
            head_dim=head_dim,
            num_heads=num_heads,
            window=0 if has_prefix else sliding_window,
            has_prefix=has_prefix,
            key_block=tile.key_block,
            least_blocks=tile.least_blocks,
            prefix_key_block=over_prefix.key_block,
            prefix_least_blocks=over_prefix.least_blocks,
            part_block=PARTS_AT_A_TIME,
            dim_block=next_power_of_2(head_dim),
            num_warps=4,
            enable_fp_fusion=True,
            **overlapping,
        )
    return out
