# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Attention of prompts and mixed batches: one program per block of a request's queries and KV head.

    requests (query_lens)   5       1   3          query_block 2
    tiles                   0 1 2 | 3 | 4 5 | 6    the last for padding: its tokens get zeros

Which request a tile belongs to is found on the device, by counting the tiles of those before it. There are
at most `tokens / query_block + requests` tiles, which is the grid; the surplus returns at once. A tile's rows
are its queries times the query heads that share the KV head. Keys that all queries of a tile see are taken
without a mask, the last blocks with one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..host_sizes import cdiv, next_power_of_2
from .batch import PAGE_SIZE
from .triton_tiles import LOG2_E, fold_in, keys_and_values

INDEX_BUFFERS = ("page_table", "req_rows", "seq_lens", "query_starts", "query_lens")
VARYING = ("num_tokens", "num_requests")


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=INDEX_BUFFERS)
def _prefill(
    q,
    k_cache,
    v_cache,
    out,
    page_table,
    req_rows,
    seq_lens,
    query_starts,
    query_lens,
    scale,
    num_tokens,
    num_requests,
    token_stride,
    page_table_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    window: tl.constexpr,
    query_block: tl.constexpr,
    group_block: tl.constexpr,
    key_block: tl.constexpr,
    dim_block: tl.constexpr,
    request_block: tl.constexpr,
):
    kv_head = tl.program_id(0)
    requests = tl.arange(0, request_block)
    lengths = tl.load(query_lens + requests, mask=requests < num_requests, other=0)
    tiles = tl.cdiv(lengths, query_block)
    num_tiles = tl.sum(tiles, 0)
    # From the last one on: late queries of a prompt see most keys, and the longest work should begin first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)

    group: tl.constexpr = num_heads // num_kv_heads
    tile_row = tl.arange(0, query_block * group_block)
    in_group = tile_row % group_block
    head = kv_head * group + in_group
    dims = tl.arange(0, dim_block)
    in_head = dims < head_dim
    if tile >= num_tiles:
        padded = tl.sum(lengths, 0) + (tile - num_tiles) * query_block + tile_row // group_block
        blank = (padded < num_tokens) & (in_group < group)
        place = padded.to(tl.int64) * num_heads + head
        zeros = tl.zeros([query_block * group_block, dim_block], out.dtype.element_ty)
        mask = blank[:, None] & in_head[None, :]
        tl.store(out + place[:, None] * head_dim + dims[None, :], zeros, mask)
        return
    request = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    first_query = (tile - tl.sum(tl.where(requests < request, tiles, 0), 0)) * query_block
    query_len = tl.load(query_lens + request)
    seq_len = tl.load(seq_lens + request)
    pages = page_table + tl.load(req_rows + request).to(tl.int64) * page_table_stride

    # What this block of queries sees; what all of it sees ends after its first query's own position.
    first_position = seq_len - query_len + first_query
    end = tl.minimum(seq_len, first_position + query_block)
    begin = 0
    begin_whole = 0
    if window > 0:
        begin = tl.maximum(0, first_position - window + 1) // key_block * key_block
        begin_whole = tl.cdiv(tl.maximum(0, end - window), key_block) * key_block
    end_whole = tl.maximum((first_position + 1) // key_block * key_block, begin)
    begin_whole = tl.minimum(tl.maximum(begin_whole, begin), end_whole)

    query = first_query + tile_row // group_block
    real = (query < query_len) & (in_group < group)
    token = tl.load(query_starts + request).to(tl.int64) + query
    q_tile = tl.load(
        q + token[:, None] * token_stride + head[:, None] * head_dim + dims[None, :],
        mask=real[:, None] & in_head[None, :],
        other=0.0,
    )
    position = first_position + tile_row // group_block
    best = tl.full([query_block * group_block], float("-inf"), tl.float32)
    total = tl.zeros([query_block * group_block], tl.float32)
    acc = tl.zeros([query_block * group_block, dim_block], tl.float32)
    offsets = tl.arange(0, key_block)
    if window > 0:
        for start in range(begin, begin_whole, key_block):
            k_tile, v_tile = keys_and_values(
                k_cache, v_cache, pages, start, end, kv_head,
                num_kv_heads, head_dim, page_size, key_block, dim_block,
            )  # fmt: skip
            best, total, acc = fold_in(
                q_tile, k_tile, v_tile, start + offsets, position, end, best, total, acc, scale, window, True
            )
    for start in range(begin_whole, end_whole, key_block):
        k_tile, v_tile = keys_and_values(
            k_cache, v_cache, pages, start, end, kv_head,
            num_kv_heads, head_dim, page_size, key_block, dim_block,
        )  # fmt: skip
        best, total, acc = fold_in(
            q_tile, k_tile, v_tile, start + offsets, position, end, best, total, acc, scale, window, False
        )
    for start in range(end_whole, end, key_block):
        k_tile, v_tile = keys_and_values(
            k_cache, v_cache, pages, start, end, kv_head,
            num_kv_heads, head_dim, page_size, key_block, dim_block,
        )  # fmt: skip
        best, total, acc = fold_in(
            q_tile, k_tile, v_tile, start + offsets, position, end, best, total, acc, scale, window, True
        )

    # Surplus rows of a tile may have seen nothing.
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = out + (token * num_heads + head)[:, None] * head_dim + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), real[:, None] & in_head[None, :])


def launch_prefill(
    q: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    req_rows: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    query_lens: Tensor,
    *,
    scale: float,
    sliding_window: int,
) -> None:
    """Queue the kernel: q [T, Hq, D], whose heads lie side by side, into `out` of that shape, dense."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_requests = k_cache.size(2), req_rows.size(0)
    # float32 products need more registers.
    rows, key_block, num_stages = (32, 32, 2) if q.dtype == torch.float32 else (64, 64, 4)
    group_block = next_power_of_2(num_heads // num_kv_heads)
    query_block = max(1, rows // group_block)
    grid = (num_kv_heads, cdiv(num_tokens, query_block) + num_requests)
    _prefill[grid](
        q,
        k_cache,
        v_cache,
        out,
        page_table,
        req_rows,
        seq_lens,
        query_starts,
        query_lens,
        scale * LOG2_E,
        num_tokens,
        num_requests,
        q.stride(0),
        page_table.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=PAGE_SIZE,
        window=sliding_window,
        query_block=query_block,
        group_block=group_block,
        key_block=key_block,
        dim_block=max(16, next_power_of_2(head_dim)),
        request_block=max(16, next_power_of_2(num_requests)),
        num_warps=4,
        num_stages=num_stages,
        # Which blocks take a mask depends on where a chunk begins. Fused differently with and without one, a
        # query's result would depend on its neighbours in the last bit.
        enable_fp_fusion=False,
    )
