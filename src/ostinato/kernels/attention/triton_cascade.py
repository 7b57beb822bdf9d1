# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Attention of single tokens whose requests share a prefix: its keys and values are read once for all.

    positions           0                    prefix_len              position
    request a           | - - - - - - - - - - - - |--- its own ----------|
    request b           | - - shared pages  - - - |--- its own ---|
    who reads them      `_attend_prefix`          `triton_decode`, one program per token
    parts of a context  | split | split | ...     | split | ...

1. `triton_decode` prepares heads, stores the new key and value, attends to what is behind the prefix, and
   leaves its parts and the queries;
2. `_attend_prefix` multiplies the queries of all requests with blocks of the prefix, one program per block of
   queries, KV head and part of the prefix;
3. `_merge` joins the parts of each token and head by their weights.

Grids follow from the rung and the longest context. The prefix is that of the first request's pages; how long
it is, a request's row says: row 0 says 0, so that padding has no prefix.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..dependent_launch import wait_for_previous
from ..host_sizes import cdiv, next_power_of_2
from .batch import PAGE_SIZE
from .decode_tiles import DecodeTile, PrefixTile, decode_tile, num_splits_of, prefix_splits_of, prefix_tile
from .heads import HeadPreparation
from .triton_decode import launch_decode, split_range
from .triton_tiles import INDEX_BUFFERS, LOG2_E, fold_in, keys_and_values

_PARTS_AT_A_TIME = 16


@triton.jit
def prefix_range(prefix_len, split, num_splits, key_block: tl.constexpr, least_blocks: tl.constexpr):
    """(begin, end, splits in use): the positions of the prefix that a split attends to."""
    blocks = tl.cdiv(prefix_len, key_block)
    per_split = tl.maximum(tl.cdiv(blocks, num_splits), least_blocks)
    begin = split * per_split * key_block
    return begin, tl.minimum(begin + per_split * key_block, prefix_len), tl.cdiv(blocks, per_split)


@triton.jit(
    do_not_specialize=("num_tokens", "num_splits", "num_parts", "first_part"),
    do_not_specialize_on_alignment=INDEX_BUFFERS,
)
def _attend_prefix(
    q,
    k_cache,
    v_cache,
    partial,
    partial_lse,
    page_table,
    token_rows,
    prefix_lens,
    scale,
    page_table_stride,
    num_tokens,
    num_splits,
    num_parts,
    first_part,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    query_block: tl.constexpr,
    key_block: tl.constexpr,
    least_blocks: tl.constexpr,
    dim_block: tl.constexpr,
    dependent: tl.constexpr,
):
    # Blocks of queries that read the same keys run side by side, so that one of them finds these in L2.
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row = tl.load(token_rows).to(tl.int64)
    pages = page_table + first_row * page_table_stride
    prefix_len = tl.load(prefix_lens + first_row)
    begin, end, _ = prefix_range(prefix_len, split, num_splits, key_block, least_blocks)
    # The first split stays, whatever there is to do: somebody has to wait for the kernel before.
    if (split > 0) & (begin >= end):
        return
    group: tl.constexpr = num_heads // num_kv_heads
    query = block * query_block + tl.arange(0, query_block)
    token = (query // group).to(tl.int64)
    head = kv_head * group + query % group
    dims = tl.arange(0, dim_block)
    mask = (token < num_tokens)[:, None] & (dims < head_dim)[None, :]
    place = token * num_heads + head
    wait_for_previous(dependent)
    q_tile = tl.load(q + place[:, None] * head_dim + dims[None, :], mask=mask, other=0.0)
    best = tl.full([query_block], float("-inf"), tl.float32)
    total = tl.zeros([query_block], tl.float32)
    acc = tl.zeros([query_block, dim_block], tl.float32)
    offsets = tl.arange(0, key_block)
    last = end - 1 + tl.zeros([query_block], tl.int32)
    end_whole = begin + (end - begin) // key_block * key_block
    for start in range(begin, end_whole, key_block):
        k_tile, v_tile = keys_and_values(
            k_cache, v_cache, pages, start, end, kv_head,
            num_kv_heads, head_dim, page_size, key_block, dim_block,
        )  # fmt: skip
        best, total, acc = fold_in(
            q_tile, k_tile, v_tile, start + offsets, last, end, best, total, acc, scale, 0, False
        )
    for start in range(end_whole, end, key_block):
        k_tile, v_tile = keys_and_values(
            k_cache, v_cache, pages, start, end, kv_head,
            num_kv_heads, head_dim, page_size, key_block, dim_block,
        )  # fmt: skip
        best, total, acc = fold_in(
            q_tile, k_tile, v_tile, start + offsets, last, end, best, total, acc, scale, 0, True
        )
    # Where there is no prefix nobody reads what is stored here.
    total = tl.where(total > 0.0, total, 1.0)
    part = place * num_parts + first_part + split
    tl.store(partial + part[:, None] * head_dim + dims[None, :], acc / total[:, None], mask)
    tl.store(partial_lse + part, best + tl.log2(total), token < num_tokens)


@triton.jit(
    do_not_specialize=("num_splits", "num_prefix_splits"), do_not_specialize_on_alignment=INDEX_BUFFERS
)
def _merge(
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
    prefix_len = tl.load(prefix_lens + tl.load(token_rows + token).to(tl.int64))
    # Only these parts were written for this token; memory of the others holds anything.
    _, _, in_use = split_range(position, prefix_len, 0, num_splits, True, 0, key_block, least_blocks)
    _, _, prefix_in_use = prefix_range(
        prefix_len, 0, num_prefix_splits, prefix_key_block, prefix_least_blocks
    )
    num_parts = num_splits + num_prefix_splits
    place = token * num_heads + head
    dims = tl.arange(0, dim_block)
    in_head = dims < head_dim
    # The first part is always there: from it on there is a best.
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([dim_block], tl.float32)
    wait_for_previous(dependent)
    for first in range(0, num_splits + prefix_in_use, part_block):
        part = first + tl.arange(0, part_block)
        written = (part < in_use) | ((part >= num_splits) & (part < num_splits + prefix_in_use))
        lse = tl.load(partial_lse + place * num_parts + part, mask=written, other=float("-inf"))
        values = tl.load(
            partial + (place * num_parts + part)[:, None] * head_dim + dims[None, :],
            mask=written[:, None] & in_head[None, :],
            other=0.0,
        )
        new_best = tl.maximum(best, tl.max(lse, 0))
        weights = tl.exp2(lse - new_best)
        faded = tl.exp2(best - new_best)
        total = total * faded + tl.sum(weights, 0)
        acc = acc * faded + tl.sum(values * weights[:, None], 0)
        best = new_best
    tl.store(out + place * head_dim + dims, (acc / total).to(out.dtype.element_ty), in_head)


def launch_prefix(
    q: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    token_rows: Tensor,
    prefix_lens: Tensor,
    *,
    num_splits: int,
    scale: float,
    tile: PrefixTile,
) -> None:
    """Queue the kernel: q [T, Hq, D] into the last of the partials [T, Hq, parts, D]."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_parts = k_cache.size(2), partial.size(2)
    blocks = cdiv(num_tokens * (num_heads // num_kv_heads), tile.query_block)
    _attend_prefix[(blocks, num_kv_heads, num_splits)](
        q,
        k_cache,
        v_cache,
        partial,
        partial_lse,
        page_table,
        token_rows,
        prefix_lens,
        scale * LOG2_E,
        page_table.stride(0),
        num_tokens,
        num_splits,
        num_parts,
        num_parts - num_splits,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=PAGE_SIZE,
        query_block=tile.query_block,
        key_block=tile.key_block,
        least_blocks=tile.least_blocks,
        dim_block=max(16, next_power_of_2(head_dim)),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
        **dependent_launch.options(q.device),
    )


def launch_merge(
    partial: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    prefix_lens: Tensor,
    *,
    num_splits: int,
    tile: DecodeTile,
    over_prefix: PrefixTile,
) -> None:
    """Join partials [T, Hq, parts, D], `num_splits` of them from behind the prefix, into `out` [T, Hq, D]."""
    num_tokens, num_heads, num_parts, head_dim = partial.shape
    _merge[(num_heads, num_tokens)](
        partial,
        partial_lse,
        out,
        token_rows,
        positions,
        prefix_lens,
        num_splits,
        num_parts - num_splits,
        head_dim=head_dim,
        num_heads=num_heads,
        key_block=tile.key_block,
        least_blocks=tile.least_blocks,
        prefix_key_block=over_prefix.key_block,
        prefix_least_blocks=over_prefix.least_blocks,
        part_block=_PARTS_AT_A_TIME,
        dim_block=next_power_of_2(head_dim),
        num_warps=4,
        enable_fp_fusion=True,
        **dependent_launch.options(out.device),
    )


def attend_tokens(
    rows: Tensor,
    heads: HeadPreparation,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    prefix_lens: Tensor,
    num_heads: int,
    scale: float,
    max_context: int,
) -> Tensor:
    """Attention [T, Hq, D] of tokens whose QKV rows are `rows`, and whose requests share a prefix."""
    num_tokens, num_kv_heads, head_dim = rows.size(0), k_cache.size(2), k_cache.size(3)
    queries = rows.new_empty(num_tokens, num_heads, head_dim)
    out = torch.empty_like(queries)
    if not num_tokens:
        return out
    tile, over_prefix = (
        decode_tile(rows.dtype, num_tokens),
        prefix_tile(rows.dtype, num_tokens, num_heads // num_kv_heads),
    )
    splits = num_splits_of(num_tokens, num_kv_heads)
    prefix_splits = prefix_splits_of(over_prefix, num_tokens, num_heads, num_kv_heads, max_context)
    sizes = (num_tokens, num_heads, splits + prefix_splits)
    partial = torch.empty(*sizes, head_dim, dtype=torch.float32, device=rows.device)
    partial_lse = torch.empty(sizes, dtype=torch.float32, device=rows.device)
    launch_decode(
        rows,
        queries,
        partial,
        partial_lse,
        k_cache,
        v_cache,
        page_table,
        token_rows,
        positions,
        heads,
        num_heads=num_heads,
        num_splits=splits,
        scale=scale,
        sliding_window=0,
        tile=tile,
        prefix_lens=prefix_lens,
    )
    launch_prefix(
        queries,
        partial,
        partial_lse,
        k_cache,
        v_cache,
        page_table,
        token_rows,
        prefix_lens,
        num_splits=prefix_splits,
        scale=scale,
        tile=over_prefix,
    )
    launch_merge(
        partial,
        partial_lse,
        out,
        token_rows,
        positions,
        prefix_lens,
        num_splits=splits,
        tile=tile,
        over_prefix=over_prefix,
    )
    return out
