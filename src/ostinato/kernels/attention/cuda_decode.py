"""Attention of a few tokens a request from the QKV projection, in CUDA C++ (`cuda/decode_attention.cu`).

Does what `triton_decode` does for single tokens, where `serves` says so: norm, rotation, KV write and
attention in one kernel, whose CTAs share out the contexts of all requests evenly, whatever their lengths.
Keys and values are read once for all tokens of a request.
"""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..cuda.compiled import ColdCudaError, CudaKernel, cuda_kernel, is_supported
from ..gpu import gpu_of
from ..on_chip_memory import AS_IT_IS
from .batch import PAGE_SIZE, HeadPreparation, PagedTokens
from .choice import CUDA_MAX_TOKENS, CudaDecodeTile, cuda_decode_tile
from .triton_tiles import LOG2_E

_MAX_GROUP = 16
_MAX_HEADS = 32
"""Query heads of all tokens of a request that share a KV head."""
_MAX_QUERIES = 16


def serves(
    qkv: Tensor, heads: HeadPreparation, k_cache: Tensor, num_heads: int, num_queries: int = 1
) -> bool:
    """Tells whether `attend_tokens` can do this."""
    dtype = k_cache.dtype
    if not is_supported(qkv.device) or dtype not in (torch.bfloat16, torch.float16):
        return False
    is_whole = qkv.dim() == 2 and qkv.dtype == dtype
    is_in_parts = qkv.dim() == 3 and qkv.dtype == torch.float32 and qkv.is_contiguous()
    norms = (norm for norm in (heads.q_norm, heads.k_norm) if norm is not None)
    return (
        (is_whole or is_in_parts)
        and all(norm.dtype == dtype for norm in norms)
        and PAGE_SIZE == 16  # a tile of the kernel is a page
        and k_cache.size(3) % 16 == 0
        and k_cache.size(3) <= 128
        and num_heads <= _MAX_GROUP * k_cache.size(2)
        and num_queries <= _MAX_QUERIES
        and (num_queries == 1 or num_heads * num_queries <= _MAX_HEADS * k_cache.size(2))
        and 0 < qkv.size(-2) <= CUDA_MAX_TOKENS[-1] * num_queries
        and (num_queries == 1 or (qkv.stride(-1) == 1 and qkv.size(-2) % num_queries == 0))
        and qkv.stride(-2) % 2 == 0  # two elements are loaded at a time
        and qkv.data_ptr() % (2 * qkv.element_size()) == 0
    )


def most_queries(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Tokens of one prompt for which `serves` is true, of layers like these; 0: for none."""
    has_types = is_supported(device) and dtype in (torch.bfloat16, torch.float16)
    has_heads = head_dim % 16 == 0 and head_dim <= 128 and num_heads <= _MAX_GROUP * num_kv_heads
    if not has_types or not has_heads or PAGE_SIZE != 16:
        return 0
    return max(1, min(_MAX_QUERIES, _MAX_HEADS * num_kv_heads // num_heads))


def attend_tokens(
    qkv: Tensor,
    heads: HeadPreparation,
    tokens: PagedTokens,
    num_heads: int,
    scale: float,
    sliding_window: int,
    query_lens: Tensor | None = None,
    num_queries: int = 1,
) -> Tensor:
    """Attention [T, Hq, D] of tokens whose projection is `qkv`, or the sum of it: float32 [parts, T, ...].

    Each request has `num_queries` places for tokens, of which it uses the first `query_lens` int32 [R]; see
    `AttentionBatch.equal_places`.
    """
    assert num_queries == 1 or query_lens is not None
    k_cache, v_cache, page_table, token_rows, positions = tokens
    num_requests, num_kv_heads, head_dim = qkv.size(-2) // num_queries, k_cache.size(2), k_cache.size(3)
    group = num_heads // num_kv_heads
    gpu = gpu_of(qkv.device)
    tile = cuda_decode_tile(num_requests, num_kv_heads, group, gpu, num_queries)
    out = k_cache.new_empty(qkv.size(-2), num_heads, head_dim)
    chunks = min(tile.max_chunks, -(-page_table.size(1) // tile.chunk_tiles))
    partial = partial_sums = out
    if chunks > 1:
        sizes = (num_requests, num_kv_heads, chunks, group * num_queries)
        partial = torch.empty(*sizes, head_dim, dtype=torch.float32, device=qkv.device)
        partial_sums = torch.empty(*sizes, 2, dtype=torch.float32, device=qkv.device)
    kernel, shared_bytes = decode_kernel(
        tile,
        num_requests,
        head_dim=head_dim,
        group=group,
        num_kv_heads=num_kv_heads,
        has_norm=heads.q_norm is not None,
        dtype=k_cache.dtype,
        parts=qkv.size(0) if qkv.dim() == 3 else 1,
        num_queries=num_queries,
    )
    # More than are resident at a time would have to wait, and find nothing left to do.
    resident = min(tile.programs, gpu.most_programs(shared_bytes))
    programs = min(num_requests * num_kv_heads * chunks, gpu.multiprocessors * resident)
    kernel.launch(
        grid=(programs, 1, 1),
        block=32 * tile.warps,
        args=(
            qkv,
            qkv if heads.q_norm is None else heads.q_norm,
            qkv if heads.k_norm is None else heads.k_norm,
            heads.rotary,
            k_cache,
            v_cache,
            out,
            partial,
            partial_sums,
            counters_of(k_cache),
            page_table,
            token_rows,
            positions,
            token_rows if query_lens is None else query_lens,
            scale * LOG2_E,
            heads.eps,
            qkv.stride(-2),
            page_table.stride(0),
            num_requests,
            sliding_window,
            tile.chunk_tiles,
            chunks,
        ),
        shared_bytes=shared_bytes,
        shared_share=AS_IT_IS,
    )
    return out


def decode_kernel(
    tile: CudaDecodeTile,
    num_requests: int,
    *,
    head_dim: int,
    group: int,
    num_kv_heads: int,
    has_norm: bool,
    dtype: torch.dtype,
    parts: int = 1,
    num_queries: int = 1,
) -> tuple[CudaKernel, int]:
    """Returns the kernel for a batch, and the shared memory of a CTA."""
    max_tokens = next(limit for limit in CUDA_MAX_TOKENS if num_requests <= limit)
    # As the source lays it out: rings and queries in padded rows, new keys and values, the list of work.
    row, padded_row = 2 * head_dim, 2 * head_dim + 16
    rows_bytes = (tile.warps * tile.slots * 16 + group * num_queries) * padded_row + 2 * num_queries * row
    shared_bytes = rows_bytes + max_tokens * 6 + max_tokens // 32 * 4
    kernel = cuda_kernel(
        "decode_attention.cu",
        "attend",
        HEAD_DIM=head_dim,
        GROUP=group,
        QUERIES=num_queries,
        KV_HEADS=num_kv_heads,
        MAX_TOKENS=max_tokens,
        SHARED_BYTES=shared_bytes,
        WARPS=tile.warps,
        SLOTS=tile.slots,
        MIN_PROGRAMS=tile.programs,
        NORM=has_norm,
        HALF=dtype == torch.float16,
        PARTS=parts,
    )
    return kernel, shared_bytes


_counters_of_caches: dict[tuple[torch.device, int, int], tuple[StorageWeakRef, Tensor]] = {}


def counters_of(k_cache: Tensor) -> Tensor:
    """Zeros before and after every launch on these keys, none of which begins before the last one ended.

    Kept as long as the keys, because graphs point to them.
    """
    place = k_cache.device, k_cache.size(2), k_cache.data_ptr()
    known = _counters_of_caches.get(place)
    if known is not None and not known[0].expired():
        return known[1]
    if k_cache.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ColdCudaError("attention is captured before it has run on this cache: run the step once before")
    for gone in [place for place, (keys, _) in _counters_of_caches.items() if keys.expired()]:
        del _counters_of_caches[gone]
    size = 1 + CUDA_MAX_TOKENS[-1] * k_cache.size(2)
    counters = torch.zeros(size, dtype=torch.int32, device=k_cache.device)
    _counters_of_caches[place] = StorageWeakRef(k_cache.untyped_storage()), counters
    return counters
