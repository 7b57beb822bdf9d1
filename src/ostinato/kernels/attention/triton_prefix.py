# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Attention of single tokens to a prefix that their requests share: read once for all of them.

One CTA per block of queries of any requests, KV head and part of the prefix multiplies these queries with
blocks of the prefix, and leaves its part where `triton_decode` leaves those of what is behind the prefix.

The grid follows from the rung and the longest context. The prefix is that of the first request's pages; how
long it is, a request's row says: row 0 says 0, so that padding has no prefix.
"""

import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..dependent_launch import wait_for_previous
from ..host_sizes import cdiv, next_power_of_2
from .batch import PAGE_SIZE
from .choice import PrefixTile
from .triton_tiles import INDEX_BUFFERS, LOG2_E, attend_to_keys


@triton.jit
def prefix_range(prefix_len, split, num_splits, key_block: tl.constexpr, least_blocks: tl.constexpr):
    """(begin, end, splits in use): the positions of the prefix that a split attends to."""
    blocks = tl.cdiv(prefix_len, key_block)
    per_split = tl.maximum(tl.cdiv(blocks, num_splits), least_blocks)
    begin = split * per_split * key_block
    return begin, tl.minimum(begin + per_split * key_block, prefix_len), tl.cdiv(blocks, per_split)


@triton.jit(
    do_not_specialize=("num_tokens", "num_splits", "num_parts", "first_part"),
    do_not_specialize_on_alignment=(*INDEX_BUFFERS, "prefix_lens"),
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
    last = tl.maximum(end - 1, 0)
    best, total, acc = attend_to_keys(
        q_tile, last + tl.zeros([query_block], tl.int32), last, last, begin, end,
        k_cache, v_cache, pages, kv_head, scale,
        num_kv_heads, head_dim, page_size, 0, key_block, dim_block,
    )  # fmt: skip
    # Where there is no prefix nobody reads what is stored here.
    total = tl.where(total > 0.0, total, 1.0)
    part = place * num_parts + first_part + split
    tl.store(partial + part[:, None] * head_dim + dims[None, :], acc / total[:, None], mask)
    tl.store(partial_lse + part, best + tl.log2(total), token < num_tokens)


def attend_prefix(
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
    """Attends with q [T, Hq, D] and fills the last `num_splits` of the partials [T, Hq, parts, D]."""
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
