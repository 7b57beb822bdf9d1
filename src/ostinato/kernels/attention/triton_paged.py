# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Triton kernels for the same functions as `torch_reference`, as custom ops that a graph can hold.

One attention kernel serves decode and prompts; they differ in its tile. A program takes one request, a block
of its queries, one KV head with all the query heads that share it, and one part of the context:

    rows of the tile      (query 0, head 0) (query 0, head 1) ... (query 1, head 0) ...
    parts of the context  | split 0 | split 1 | ...      more than one only for short queries (decode)

Several splits leave partial results, which `_combine_splits` joins. Grids follow from the rung (requests,
`max_query_len`, `max_context`, KV heads); programs that find nothing to do in the real lengths, read from the
batch's buffers, return at once. Where a split begins depends on `max_context` alone, never on the batch.

The Triton interpreter (TRITON_INTERPRET=1 before Python starts) runs all of it without a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .batch import PAGE_SIZE, AttentionBatch, HostLengths

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether the kernels here run in Triton's interpreter, on any device."""

_MIN_SPLIT = 256
_MAX_SPLITS = 64
# Queries up to this length are few enough per program that the context must be split to fill a GPU.
_LONGEST_SPLIT_QUERY = 16
# tl.dot wants 16 rows at least.
_MIN_TILE_ROWS = 16
# Views of these may begin anywhere; specialising on their alignment would compile while serving.
_INDEX_BUFFERS = (
    "page_table",
    "token_rows",
    "positions",
    "req_rows",
    "seq_lens",
    "query_starts",
    "query_lens",
)


@triton.jit(do_not_specialize_on_alignment=_INDEX_BUFFERS)
def _write_kv(
    k,
    v,
    k_cache,
    v_cache,
    page_table,
    token_rows,
    positions,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    page_table_stride,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    row = tl.load(token_rows + token).to(tl.int64)
    page = tl.load(page_table + row * page_table_stride + position // page_size).to(tl.int64)
    slot = page * page_size + position % page_size
    offsets = tl.arange(0, block)
    inside = offsets < num_kv_heads * head_dim
    head, dim = offsets // head_dim, offsets % head_dim
    target = slot * (num_kv_heads * head_dim) + offsets
    new_k = tl.load(k + token * k_token_stride + head * k_head_stride + dim, inside)
    new_v = tl.load(v + token * v_token_stride + head * v_head_stride + dim, inside)
    tl.store(k_cache + target, new_k.to(k_cache.dtype.element_ty), inside)
    tl.store(v_cache + target, new_v.to(v_cache.dtype.element_ty), inside)


@triton.jit(do_not_specialize_on_alignment=_INDEX_BUFFERS)
def _attend(
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
    q_token_stride,
    q_head_stride,
    page_table_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    window: tl.constexpr,
    split_len: tl.constexpr,
    num_splits: tl.constexpr,
    query_block: tl.constexpr,
    group_block: tl.constexpr,
    key_block: tl.constexpr,
    dim_block: tl.constexpr,
):
    request, kv_head, split = tl.program_id(0), tl.program_id(2) // num_splits, tl.program_id(2) % num_splits
    first_query = tl.program_id(1) * query_block
    query_len = tl.load(query_lens + request)
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens + request)
    first_token = tl.load(query_starts + request).to(tl.int64)
    pages = page_table + tl.load(req_rows + request).to(tl.int64) * page_table_stride

    # What this block of queries sees: positions first_seen to end_seen, of which this split takes its part.
    first_position = seq_len - query_len + first_query
    end_seen = tl.minimum(seq_len, first_position + query_block)
    first_seen = 0
    if window > 0:
        first_seen = tl.maximum(0, first_position - window + 1)
    begin = tl.maximum(split * split_len, first_seen // key_block * key_block)
    end = tl.minimum((split + 1) * split_len, end_seen)
    if begin >= end:
        return

    group: tl.constexpr = num_heads // num_kv_heads
    tile_row = tl.arange(0, query_block * group_block)
    query, in_group = first_query + tile_row // group_block, tile_row % group_block
    real = (query < query_len) & (in_group < group)
    head = kv_head * group + in_group
    token = first_token + query
    dims = tl.arange(0, dim_block)
    in_head = dims < head_dim
    q_tile = tl.load(
        q + token[:, None] * q_token_stride + head[:, None] * q_head_stride + dims[None, :],
        mask=real[:, None] & in_head[None, :],
        other=0.0,
    )
    position = seq_len - query_len + query

    best = tl.full([query_block * group_block], float("-inf"), tl.float32)
    total = tl.zeros([query_block * group_block], tl.float32)
    acc = tl.zeros([query_block * group_block, dim_block], tl.float32)
    for start in range(begin, end, key_block):
        key = start + tl.arange(0, key_block)
        in_context = key < end
        page = tl.load(pages + key // page_size, mask=in_context, other=0).to(tl.int64)
        places = ((page * page_size + key % page_size) * num_kv_heads + kv_head) * head_dim
        wanted = in_context[:, None] & in_head[None, :]
        k_tile = tl.load(k_cache + places[:, None] + dims[None, :], mask=wanted, other=0.0)
        v_tile = tl.load(v_cache + places[:, None] + dims[None, :], mask=wanted, other=0.0)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
        visible = (key[None, :] <= position[:, None]) & in_context[None, :]
        if window > 0:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # A row may have seen nothing yet: -inf minus -inf would be NaN.
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp(scores - shift[:, None])
        faded = tl.exp(best - shift)
        total = total * faded + tl.sum(weights, 1)
        acc = acc * faded[:, None] + tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")
        best = new_best

    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    place = token * num_heads + head
    mask = real[:, None] & in_head[None, :]
    if num_splits == 1:
        target = out + place[:, None] * head_dim + dims[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask)
    else:
        place = place * num_splits + split
        tl.store(partial + place[:, None] * head_dim + dims[None, :], result, mask)
        tl.store(partial_lse + place, best + tl.log(tl.where(total > 0.0, total, 1.0)), real)


@triton.jit(do_not_specialize_on_alignment=_INDEX_BUFFERS)
def _combine_splits(
    partial,
    partial_lse,
    out,
    seq_lens,
    query_starts,
    query_lens,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    window: tl.constexpr,
    split_len: tl.constexpr,
    num_splits: tl.constexpr,
    split_block: tl.constexpr,
    dim_block: tl.constexpr,
):
    request, query, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query_len = tl.load(query_lens + request)
    if query >= query_len:
        return
    position = tl.load(seq_lens + request) - query_len + query
    first_seen = 0
    if window > 0:
        first_seen = tl.maximum(0, position - window + 1)
    # Only these splits were written for this query; memory of the others holds anything.
    splits = tl.arange(0, split_block)
    written = (splits >= first_seen // split_len) & (splits <= position // split_len) & (splits < num_splits)
    token = tl.load(query_starts + request).to(tl.int64) + query
    places = (token * num_heads + head) * num_splits + splits
    lse = tl.load(partial_lse + places, mask=written, other=float("-inf"))
    weights = tl.exp(lse - tl.max(lse, 0))
    dims = tl.arange(0, dim_block)
    in_head = dims < head_dim
    parts = tl.load(
        partial + places[:, None] * head_dim + dims[None, :],
        mask=written[:, None] & in_head[None, :],
        other=0.0,
    )
    result = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    target = out + (token * num_heads + head) * head_dim + dims
    tl.store(target, result.to(out.dtype.element_ty), in_head)


@torch.library.custom_op("ostinato::write_paged_kv", mutates_args=("k_cache", "v_cache"))
def write_paged_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    token_rows: Tensor,
    positions: Tensor,
) -> None:
    """Custom op of `torch_reference.write_kv`; k and v may be views whose last dimension is dense."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if not num_tokens:
        return
    _write_kv[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        page_table,
        token_rows,
        positions,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        page_table.stride(0),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=PAGE_SIZE,
        block=triton.next_power_of_2(num_kv_heads * head_dim),
    )


@write_paged_kv.register_fake
def _(k, v, k_cache, v_cache, page_table, token_rows, positions) -> None:
    return None


@torch.library.custom_op("ostinato::paged_attention", mutates_args=())
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    req_rows: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    query_lens: Tensor,
    max_query_len: int,
    max_context: int,
    scale: float,
    sliding_window: int,
) -> Tensor:
    """Custom op of `torch_reference.attend_captured`; `sliding_window` 0 means none."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_requests = k_cache.size(2), req_rows.size(0)
    # Zeros, not garbage: no program writes padded tokens, and the next layer must find them finite.
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if not num_tokens or not num_requests:
        return out
    split_len, num_splits = _splits(max_query_len, max_context)
    query_block, group_block, key_block = _tile(max_query_len, num_heads // num_kv_heads, q.dtype)
    dim_block = max(16, triton.next_power_of_2(head_dim))
    partial = partial_lse = out
    if num_splits > 1:
        sizes = (num_tokens, num_heads, num_splits)
        partial = torch.empty(*sizes, head_dim, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(sizes, dtype=torch.float32, device=q.device)
    _attend[(num_requests, triton.cdiv(max_query_len, query_block), num_kv_heads * num_splits)](
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
        q.stride(0),
        q.stride(1),
        page_table.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=PAGE_SIZE,
        window=sliding_window,
        split_len=split_len,
        num_splits=num_splits,
        query_block=query_block,
        group_block=group_block,
        key_block=key_block,
        dim_block=dim_block,
        num_warps=4,
        num_stages=2,
    )
    if num_splits > 1:
        _combine_splits[(num_requests, max_query_len, num_heads)](
            partial,
            partial_lse,
            out,
            seq_lens,
            query_starts,
            query_lens,
            num_heads=num_heads,
            head_dim=head_dim,
            window=sliding_window,
            split_len=split_len,
            num_splits=num_splits,
            split_block=triton.next_power_of_2(num_splits),
            dim_block=dim_block,
        )
    return out


@paged_attention.register_fake
def _(q, *others, **options) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _splits(max_query_len: int, max_context: int) -> tuple[int, int]:
    """(positions per split, splits): a power of two and a multiple of every key block."""
    if max_query_len > _LONGEST_SPLIT_QUERY or max_context <= _MIN_SPLIT:
        return triton.next_power_of_2(max(max_context, _MIN_SPLIT)), 1
    split_len = max(_MIN_SPLIT, triton.next_power_of_2(triton.cdiv(max_context, _MAX_SPLITS)))
    return split_len, triton.cdiv(max_context, split_len)


def _tile(max_query_len: int, group: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(queries, query heads, keys) of a tile, powers of two; float32 products need more registers."""
    rows, keys = (32, 32) if dtype == torch.float32 else (64, 64)
    group_block = triton.next_power_of_2(group)
    query_block = min(triton.next_power_of_2(max_query_len), max(1, rows // group_block))
    if query_block * group_block < _MIN_TILE_ROWS:
        group_block = _MIN_TILE_ROWS // query_block
    return query_block, group_block, keys


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
    """Store the step's k and v [T, Hkv, D] at the tokens' slots; padded tokens write to page 0."""
    write_paged_kv(
        _dense_rows(k),
        _dense_rows(v),
        k_cache,
        v_cache,
        batch.page_table,
        batch.token_rows,
        batch.positions,
    )


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of q [T, Hq, D] over the cache, for any batch, in a graph or out of it."""
    return paged_attention(
        _dense_rows(q),
        k_cache,
        v_cache,
        batch.page_table,
        batch.req_rows,
        batch.seq_lens,
        batch.query_starts,
        batch.query_lens,
        batch.max_query_len,
        batch.max_context,
        scale,
        sliding_window or 0,
    )


def attend_eager(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None = None,
    lengths: HostLengths | None = None,
) -> Tensor:
    """`attend`: the kernels read the lengths themselves, wherever they run."""
    return attend(q, k_cache, v_cache, batch, scale=scale, sliding_window=sliding_window)


def _dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
