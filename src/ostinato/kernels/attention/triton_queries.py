# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Attention of prompts and mixed batches, whose keys and values are stored already.

    requests (query_lens)   5       1   3          query_block 2
    tiles                   0 1 2 | 3 | 4 5        a tile has its queries times the query heads that
                                                   share the KV head

Which request a tile belongs to is found on the device, by counting the tiles of those before it. There are at
most `tokens / query_block + requests` tiles. Two forms, chosen by what is known of the rung (`query_tiles`):

- `_attend_whole`: one CTA per tile and KV head reads all that the tile sees. The surplus of the grid
  gives padded tokens zeros.
- `_attend_chunks`: for few tokens, whose tiles would leave most of a GPU idle. Contexts are cut into chunks
  (`chunk_size`), and as many CTAs as the GPU holds take tiles and chunks in turn. A token that sees one
  chunk is done; the parts of others are joined by `_join_chunks`, which also gives padded tokens zeros.

Where a token's context is cut follows from its position and the rung, so that its bits depend neither on its
company nor on how its prompt was cut into steps. For the same reason nothing is fused to an FMA: which blocks
take a mask depends on where a step begins, and fused differently with and without one, a query's result would
depend on its neighbours in the last bit.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..dependent_launch import wait_for_previous
from ..gpu import gpu_of
from ..host_sizes import cdiv, next_power_of_2
from .batch import PAGE_SIZE, PagedTokens, Requests
from .choice import Chunks, Queries, QueryTile, request_block_of
from .triton_tiles import INDEX_BUFFERS, LOG2_E, PARTS_AT_A_TIME, attend_to_keys, fold_parts

REQUEST_BUFFERS = ("req_rows", "seq_lens", "query_starts", "query_lens")
BUFFERS = INDEX_BUFFERS + REQUEST_BUFFERS
VARYING = ("num_tokens", "num_requests", "num_parts")
_TOKENS_WITH_A_PROGRAM_A_HEAD = 64
"""More of them join several heads in one CTA: where nothing is split there are fewer to start in vain."""


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=BUFFERS)
def _attend_whole(
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
    in_tile = tl.arange(0, query_block * group_block)
    in_group = in_tile % group_block
    head = kv_head * group + in_group
    dims = tl.arange(0, dim_block)
    in_head = dims < head_dim
    if tile >= num_tiles:
        padded = tl.sum(lengths, 0) + (tile - num_tiles) * query_block + in_tile // group_block
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

    # What this block of queries sees.
    first_position = seq_len - query_len + first_query
    end = tl.minimum(seq_len, first_position + query_block)
    begin = 0
    if window > 0:
        begin = tl.maximum(0, first_position - window + 1) // key_block * key_block

    query = first_query + in_tile // group_block
    real = (query < query_len) & (in_group < group)
    token = tl.load(query_starts + request).to(tl.int64) + query
    mask = real[:, None] & in_head[None, :]
    q_tile = tl.load(
        q + token[:, None] * token_stride + head[:, None] * head_dim + dims[None, :], mask=mask, other=0.0
    )
    _, total, acc = attend_to_keys(
        q_tile, first_position + in_tile // group_block, first_position, end - 1, begin, end,
        k_cache, v_cache, pages, kv_head, scale,
        num_kv_heads, head_dim, page_size, window, key_block, dim_block,
    )  # fmt: skip
    # The surplus of a tile may have seen nothing.
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    target = out + (token * num_heads + head)[:, None] * head_dim + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask)


@triton.jit
def chunk_size(position, least_keys, most_parts, steps: tl.constexpr):
    """Keys of the chunks into which the context of a token at `position` is cut: at most `most_parts`.

    They grow by a half and by a third in turn (`query_tiles.grown`).
    """
    size = position * 0 + least_keys
    for step in tl.static_range(steps):
        longer = size * 3 // 2 if step % 2 == 0 else size * 4 // 3
        size = tl.where(position >= most_parts * size, longer, size)
    return size


@triton.jit
def first_chunk(position, size, window: tl.constexpr):
    """Returns the first chunk of its context that a token sees; the last one has its own position."""
    first = position * 0
    if window > 0:
        first = tl.maximum(0, position - window + 1) // size
    return first


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=BUFFERS)
def _attend_chunks(
    q,
    k_cache,
    v_cache,
    out,
    partial,
    partial_lse,
    page_table,
    req_rows,
    seq_lens,
    query_starts,
    query_lens,
    scale,
    least_keys,
    num_requests,
    num_parts,
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
    steps: tl.constexpr,
    dependent: tl.constexpr,
):
    # The units of work of a request are its tiles times the chunks that any of its tokens sees. Chunks have
    # one size, but where a step crosses a length from which they are longer: tokens before that have theirs
    # behind the others.
    requests = tl.arange(0, request_block)
    lengths = tl.load(query_lens + requests, mask=requests < num_requests, other=0)
    contexts = tl.load(seq_lens + requests, mask=requests < num_requests, other=1)
    sizes = chunk_size(contexts - 1, least_keys, num_parts, steps)
    chunks = (contexts - 1) // sizes + 1 - first_chunk(contexts - lengths, sizes, window)
    early_sizes = chunk_size(contexts - lengths, least_keys, num_parts, steps)
    chunks += tl.where(early_sizes < sizes, num_parts, 0)
    units = tl.cdiv(lengths, query_block) * chunks
    ends = tl.cumsum(units, 0)
    num_units = tl.sum(units, 0) * num_kv_heads

    group: tl.constexpr = num_heads // num_kv_heads
    in_tile = tl.arange(0, query_block * group_block)
    in_group = in_tile % group_block
    dims = tl.arange(0, dim_block)
    in_head = dims < head_dim
    # Also by CTAs with nothing to do: the next kernel waits for this one only.
    wait_for_previous(dependent)
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        # Neighbours read the same keys for other queries, or the same pages for other heads.
        kv_head = unit % num_kv_heads
        request = tl.sum((ends <= unit // num_kv_heads).to(tl.int32), 0)
        in_request = unit // num_kv_heads - tl.sum(tl.where(requests < request, units, 0), 0)
        query_len = tl.load(query_lens + request)
        seq_len = tl.load(seq_lens + request)
        pages = page_table + tl.load(req_rows + request).to(tl.int64) * page_table_stride
        num_tiles = tl.cdiv(query_len, query_block)
        first_query = in_request % num_tiles * query_block
        size = chunk_size(seq_len - 1, least_keys, num_parts, steps)
        chunk = in_request // num_tiles + first_chunk(seq_len - query_len, size, window)
        if chunk * size >= seq_len:
            chunk -= (seq_len - 1) // size + 1
            size = chunk_size(seq_len - query_len, least_keys, num_parts, steps)

        first_position = seq_len - query_len + first_query
        last_position = tl.minimum(seq_len, first_position + query_block) - 1
        begin = chunk * size
        end = tl.minimum(last_position + 1, begin + size)
        if window > 0:
            begin = tl.maximum(begin, tl.maximum(0, first_position - window + 1) // key_block * key_block)

        query = first_query + in_tile // group_block
        position = first_position + in_tile // group_block
        head = kv_head * group + in_group
        token = tl.load(query_starts + request).to(tl.int64) + query
        # Of the tile's tokens some may see nothing of this chunk.
        first = first_chunk(position, size, window)
        last = position // size
        real = (query < query_len) & (in_group < group) & (first <= chunk) & (chunk <= last)
        real = real & (chunk_size(position, least_keys, num_parts, steps) == size)
        mask = real[:, None] & in_head[None, :]
        q_tile = tl.load(
            q + token[:, None] * token_stride + head[:, None] * head_dim + dims[None, :], mask=mask, other=0.0
        )
        best, total, acc = attend_to_keys(
            q_tile, position, first_position, last_position, begin, end,
            k_cache, v_cache, pages, kv_head, scale,
            num_kv_heads, head_dim, page_size, window, key_block, dim_block,
        )  # fmt: skip
        total = tl.where(total > 0.0, total, 1.0)
        result = acc / total[:, None]
        place = token * num_heads + head
        is_part = first < last
        target = out + place[:, None] * head_dim + dims[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask & ~is_part[:, None])
        part = place * num_parts + (chunk - first)
        tl.store(partial + part[:, None] * head_dim + dims[None, :], result, mask & is_part[:, None])
        tl.store(partial_lse + part, best + tl.log2(total), real & is_part)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=BUFFERS)
def _join_chunks(
    partial,
    partial_lse,
    out,
    token_rows,
    positions,
    least_keys,
    num_parts,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    window: tl.constexpr,
    heads_each: tl.constexpr,
    part_block: tl.constexpr,
    dim_block: tl.constexpr,
    steps: tl.constexpr,
    dependent: tl.constexpr,
):
    token = tl.program_id(1).to(tl.int64)
    position = tl.load(positions + token).to(tl.int32)
    is_padding = tl.load(token_rows + token) == 0
    size = chunk_size(position, least_keys, num_parts, steps)
    count = position // size - first_chunk(position, size, window) + 1
    dims = tl.arange(0, dim_block)
    # Also by CTAs with nothing to join: the next kernel waits for this one only.
    wait_for_previous(dependent)
    if (count == 1) & ~is_padding:
        return
    for offset in range(heads_each):
        head = tl.program_id(0) * heads_each + offset
        place = token * num_heads + head
        target = out + place * head_dim + dims
        if is_padding:
            tl.store(target, tl.zeros([dim_block], out.dtype.element_ty), dims < head_dim)
        else:
            best = tl.full([1], float("-inf"), tl.float32)
            _, total, acc = fold_parts(
                partial, partial_lse, place * num_parts, count,
                best, tl.zeros([1], tl.float32), tl.zeros([dim_block], tl.float32),
                head_dim, part_block, dim_block,
            )  # fmt: skip
            tl.store(target, (acc / total).to(out.dtype.element_ty), dims < head_dim)


def cuts(
    q: Tensor, k_cache: Tensor, num_requests: int, sliding_window: int, max_query_len: int, max_context: int
) -> bool:
    """Tells whether contexts are cut into chunks."""
    return _divided(q, k_cache, num_requests, sliding_window, max_query_len, max_context)[1] is not None


def _divided(
    q: Tensor, k_cache: Tensor, num_requests: int, sliding_window: int, max_query_len: int, max_context: int
) -> tuple[QueryTile, Chunks | None]:
    num_tokens, num_heads, head_dim = q.shape
    rung = (num_tokens, num_requests, max_query_len, max_context)
    queries = Queries(q.dtype, *rung, num_heads, k_cache.size(2), head_dim, sliding_window)
    return queries.divided(gpu_of(q.device))


def attend_queries(
    q: Tensor,
    tokens: PagedTokens,
    requests: Requests,
    scale: float,
    sliding_window: int,
    max_query_len: int,
    max_context: int,
) -> Tensor:
    """Attention of q [T, Hq, D], whose heads lie side by side."""
    k_cache, v_cache, page_table, token_rows, positions = tokens
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_requests = k_cache.size(2), requests.req_rows.size(0)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    tile, chunks = _divided(q, k_cache, num_requests, sliding_window, max_query_len, max_context)
    strides = (q.stride(0), page_table.stride(0))
    constants = {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "page_size": PAGE_SIZE,
        "window": sliding_window,
        "dim_block": max(16, next_power_of_2(head_dim)),
        "request_block": request_block_of(num_requests),
        **vars(tile),
        "enable_fp_fusion": False,
    }
    counts: tuple[int, ...]
    if chunks is None:
        grid = (num_kv_heads, cdiv(num_tokens, tile.query_block) + num_requests)
        counts = (num_tokens, num_requests)
        _attend_whole[grid](
            q, k_cache, v_cache, out, page_table, *requests, scale * LOG2_E, *counts, *strides, **constants
        )
        return out
    partial = q.new_empty(num_tokens, num_heads, chunks.parts, head_dim, dtype=torch.float32)
    partial_lse = q.new_empty(num_tokens, num_heads, chunks.parts, dtype=torch.float32)
    counts = (chunks.keys, num_requests, chunks.parts)
    overlapping = dependent_launch.options(q.device)
    _attend_chunks[(chunks.programs,)](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        partial_lse,
        page_table,
        *requests,
        scale * LOG2_E,
        *counts,
        *strides,
        steps=chunks.steps,
        **constants,
        **overlapping,
    )
    heads_each = 1 if num_tokens <= _TOKENS_WITH_A_PROGRAM_A_HEAD else math.gcd(num_heads, 4)
    _join_chunks[(num_heads // heads_each, num_tokens)](
        partial,
        partial_lse,
        out,
        token_rows,
        positions,
        chunks.keys,
        chunks.parts,
        num_heads=num_heads,
        head_dim=head_dim,
        window=sliding_window,
        heads_each=heads_each,
        part_block=PARTS_AT_A_TIME,
        dim_block=next_power_of_2(head_dim),
        steps=chunks.steps,
        num_warps=4,
        enable_fp_fusion=False,
        **overlapping,
    )
    return out
