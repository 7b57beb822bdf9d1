"""The kernels as custom ops, and as the functions of the attention backend of NVIDIA GPUs.

| batch | kernels |
|---|---|
| single tokens (`max_query_len` 1) | `cuda_decode` where it serves, else `triton_decode` |
| a few tokens each, in `equal_places` | `cuda_decode` where it serves, else as anything |
| single tokens behind a shared prefix | `triton_decode` and `triton_prefix` |
| anything | `triton_heads`, then `cuda_queries` where it serves uncut contexts, else `triton_queries` |

All begin with the QKV projection. From heads that are ready, as a model has them whose preparation no kernel
knows, torch stores the step's KV and one of the last two attends, to single tokens as well.

Grids follow from the rung (tokens, requests, heads); what varies is read from the batch's buffers. The Triton
interpreter (TRITON_INTERPRET=1 before Python starts) runs all of it without a GPU.
"""

import torch
from torch import Tensor

from ..cuda.compiled import is_supported
from ..custom_op import custom_op
from ..dependent_launch import INTERPRETED
from ..linear.products import joined
from . import cuda_decode, cuda_queries, triton_decode, triton_heads, triton_queries
from .batch import AttentionBatch, HeadPreparation, HostLengths, PagedTokens, Requests

__all__ = ["INTERPRETED", "attend", "attend_eager", "attend_qkv", "keep_beside", "most_places", "store_qkv"]

most_places = cuda_decode.most_queries


def keep_beside(k_cache: Tensor) -> None:
    """Make what kernels in CUDA C++ keep beside these keys."""
    if is_supported(k_cache.device):
        cuda_decode.counters_of(k_cache)


def _empty_attention(qkv: Tensor, tokens: PagedTokens, num_heads: int) -> Tensor:
    """Allocates [T, Hq, D]."""
    return tokens.k_cache.new_empty(qkv.size(-2), num_heads, tokens.k_cache.size(3))


@custom_op("attend_tokens", mutates_args=("k_cache", "v_cache"), result=_empty_attention)
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
    """Norm, rotation, KV write and attention of single tokens, from qkv [T, (Hq + 2 Hkv) * D].

    Or from float32 split-K partials [parts, T, (Hq + 2 Hkv) * D]. With `prefix_lens` all requests begin with
    the same `prefix_lens[row]` positions.
    """
    if prefix_lens is None and cuda_decode.serves(qkv, heads, tokens.k_cache, num_heads):
        return cuda_decode.attend_tokens(qkv, heads, tokens, num_heads, scale, sliding_window)
    whole = joined(qkv, tokens.k_cache.dtype)
    limits = (sliding_window, max_context)
    return triton_decode.attend_tokens(whole, heads, tokens, prefix_lens, num_heads, scale, *limits)


@custom_op("attend_few_tokens", mutates_args=("k_cache", "v_cache"), result=_empty_attention)
def attend_few_tokens(
    qkv: Tensor,
    heads: HeadPreparation,
    tokens: PagedTokens,
    query_lens: Tensor,
    num_heads: int,
    scale: float,
    sliding_window: int,
    num_queries: int,
) -> Tensor:
    """`attend_tokens` of requests with `num_queries` places each, the first `query_lens` of them in use."""
    return cuda_decode.attend_tokens(
        qkv, heads, tokens, num_heads, scale, sliding_window, query_lens, num_queries
    )


@custom_op("attend_queries", result=lambda q: torch.empty(q.shape, dtype=q.dtype, device=q.device))
def attend_queries(
    q: Tensor,
    tokens: PagedTokens,
    requests: Requests,
    scale: float,
    sliding_window: int,
    max_query_len: int,
    max_context: int,
) -> Tensor:
    """Attention of q [T, Hq, D], any number of tokens per request, the step's KV already written."""
    # Heads of a token have to lie side by side; tokens may have gaps between them.
    q = q if q.stride(2) == 1 and q.stride(1) == q.size(2) else q.contiguous()
    limits, num_requests = (sliding_window, max_query_len, max_context), requests.req_rows.size(0)
    if cuda_queries.serves(q, tokens.k_cache, num_requests) and not triton_queries.cuts(
        q, tokens.k_cache, num_requests, *limits
    ):
        return cuda_queries.attend_queries(q, tokens, requests, scale, sliding_window)
    return triton_queries.attend_queries(q, tokens, requests, scale, *limits)


@custom_op(
    "prepare_heads",
    mutates_args=("k_cache", "v_cache"),
    result=lambda qkv, tokens, num_heads: qkv.new_empty(qkv.size(0), num_heads, tokens.k_cache.size(3)),
)
def prepare_heads(qkv: Tensor, heads: HeadPreparation, tokens: PagedTokens, num_heads: int) -> Tensor:
    """Norm, rotation and KV write: qkv [T, (Hq + 2 Hkv) * D] to q [T, Hq, D], k and v into the caches."""
    return triton_heads.prepare_heads(qkv, heads, tokens, num_heads)


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
    limits = (sliding_window or 0, batch.max_query_len, batch.max_context)
    return attend_queries(q, batch.paged(k_cache, v_cache), batch.requests, scale, *limits)


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


def attend_qkv(
    qkv: Tensor,
    heads: HeadPreparation,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    num_heads: int,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """From the QKV projection to attention [T, Hq, D], the step's KV stored on the way.

    They may be in parts, as `products.linear_in_parts` returns them.
    """
    tokens = batch.paged(k_cache, v_cache)
    each = batch.max_query_len
    if each > 1 and batch.equal_places and cuda_decode.serves(qkv, heads, k_cache, num_heads, each):
        limits = (sliding_window or 0, each)
        return attend_few_tokens(qkv, heads, tokens, batch.query_lens, num_heads, scale, *limits)
    if each > 1:
        qkv = joined(qkv, k_cache.dtype)
    if qkv.stride(-1) != 1:
        qkv = qkv.contiguous()
    if each == 1:
        prefix_lens = batch.prefix_lens_for(sliding_window)
        limits = (sliding_window or 0, batch.max_context)
        return attend_tokens(qkv, heads, tokens, prefix_lens, num_heads, scale, *limits)
    q = prepare_heads(qkv, heads, tokens, num_heads)
    return attend(q, k_cache, v_cache, batch, scale=scale, sliding_window=sliding_window)


def store_qkv(
    qkv: Tensor,
    heads: HeadPreparation,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    num_heads: int,
) -> None:
    """Store the step's KV, from the QKV projection of any batch, perhaps in parts."""
    qkv = joined(qkv, k_cache.dtype)
    if qkv.stride(-1) != 1:
        qkv = qkv.contiguous()
    prepare_heads(qkv, heads, batch.paged(k_cache, v_cache), num_heads)
