"""Attention of prompts and mixed batches in CUDA C++ (`cuda/prompt_attention.cu`), for Hopper.

Does what `triton_queries` does for batches whose contexts are not cut, where `serves` says so.
"""

import torch
from torch import Tensor

from ..cuda.compiled import CudaKernel, TileMap, cuda_kernel, has_warpgroup_products
from ..gpu import gpu_of
from ..host_sizes import cdiv
from .batch import PAGE_SIZE, PagedTokens, Requests
from .choice import request_block_of
from .cuda_decode import counters_of
from .triton_tiles import LOG2_E

THREADS = 384
_ROWS = 128
_BOX = 64
"""Elements of a head that are copied at a time."""
_GROUP = 8
"""Keys that lie together, for each of these boxes."""
_MOST_GROUP = 64
_MOST_REQUESTS = 1024
_MOST_SHARED_BYTES = 227 << 10


def serves(q: Tensor, k_cache: Tensor, num_requests: int) -> bool:
    """Tells whether `attend_queries` can do this."""
    return has_warpgroup_products(q.device) and fits(q, k_cache, num_requests)


def fits(q: Tensor, k_cache: Tensor, num_requests: int) -> bool:
    """Tells the same for any device."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    return (
        q.dtype == k_cache.dtype
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.size(0) > 0
        and PAGE_SIZE == 16  # a box of the kernel is one of a page
        and head_dim in (64, 128, 256)
        and q.size(1) <= _MOST_GROUP * num_kv_heads
        and num_requests <= _MOST_REQUESTS
        and k_cache.is_contiguous()
        and q.stride(0) % 8 == 0  # 16 bytes are loaded at a time
        and q.data_ptr() % 16 == 0
    )


def attend_queries(
    q: Tensor,
    tokens: PagedTokens,
    requests: Requests,
    scale: float,
    sliding_window: int,
) -> Tensor:
    """Attention of q [T, Hq, D], whose heads lie side by side."""
    k_cache, v_cache, page_table, *_ = tokens
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, num_requests = k_cache.size(2), requests.req_rows.size(0)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kernel, keys, shared_bytes = prompt_kernel(num_heads, num_kv_heads, head_dim, num_requests, q.dtype)
    queries = _ROWS * num_kv_heads // num_heads
    tiles = (cdiv(num_tokens, queries) + num_requests) * num_kv_heads
    kernel.launch(
        grid=(min(tiles, gpu_of(q.device).multiprocessors), 1, 1),
        block=THREADS,
        args=(
            *(_boxes(cache, rows) for rows in (PAGE_SIZE, keys) for cache in (k_cache, v_cache)),
            q,
            out,
            counters_of(k_cache),
            page_table,
            *requests,
            scale * LOG2_E,
            q.stride(0),
            page_table.stride(0),
            num_tokens,
            num_requests,
            sliding_window,
        ),
        shared_bytes=shared_bytes,
    )
    return out


def prompt_kernel(
    num_heads: int, num_kv_heads: int, head_dim: int, num_requests: int, dtype: torch.dtype
) -> tuple[CudaKernel, int, int]:
    """Returns the kernel for a batch, its keys per step, and the shared memory of a CTA."""
    keys = 64 if head_dim > 128 else 128
    requests = request_block_of(num_requests)

    def shared_bytes_of(stages: int) -> int:
        # As the source lays it out: queries and rings, counts, units, ends of requests.
        tiles = (_ROWS + 2 * stages * keys) * head_dim * 2
        return tiles + (4 * stages + 2 + 4) * 8 + 2 * 32 + requests * 4 + 16

    stages = 3 if shared_bytes_of(3) <= _MOST_SHARED_BYTES else 2
    shared_bytes = shared_bytes_of(stages)
    kernel = cuda_kernel(
        "prompt_attention.cu",
        "attend",
        HEAD_DIM=head_dim,
        GROUP=num_heads // num_kv_heads,
        KV_HEADS=num_kv_heads,
        KEYS=keys,
        STAGES=stages,
        MAX_REQUESTS=requests,
        SHARED_BYTES=shared_bytes,
        HALF=dtype == torch.float16,
    )
    return kernel, keys, shared_bytes


def _boxes(cache: Tensor, keys: int) -> TileMap:
    """So many keys, or values, of a head at a time: 8 of them, 64 elements each, lie together in the copy."""
    num_kv_heads, head_dim = cache.shape[2:]
    boxes = head_dim // _BOX
    groups = cache.view(-1, _GROUP, num_kv_heads * boxes, _BOX).transpose(1, 2)
    return TileMap(groups, (keys // _GROUP, boxes, _GROUP, _BOX))
