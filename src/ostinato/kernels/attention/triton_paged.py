"""The Triton kernels as custom ops, and as the functions of an attention backend.

| batch | from heads that are ready | from the rows of the QKV projection |
|---|---|---|
| single tokens (`max_query_len` 1) | `triton_write`, `triton_decode` | `cuda_decode`, else `triton_decode` |
| single tokens behind a shared prefix | as if there was none | `triton_cascade` |
| anything | `triton_write`, `triton_queries` | `triton_heads`, `triton_queries` |

Grids follow from the rung (tokens, requests, heads); what varies is read from the batch's buffers. The Triton
interpreter (TRITON_INTERPRET=1 before Python starts) runs all of it without a GPU.
"""

import torch
from torch import Tensor

from ..custom_op import custom_op
from ..dependent_launch import INTERPRETED
from ..linear.products import joined
from . import cuda_decode, triton_cascade, triton_decode, triton_queries
from .batch import AttentionBatch, HostLengths
from .heads import HeadPreparation
from .triton_heads import launch_prepare_heads
from .triton_write import launch_write_kv

__all__ = ["INTERPRETED", "attend", "attend_eager", "attend_rows", "write_kv"]


@custom_op("write_paged_kv", mutates_args=("k_cache", "v_cache"))
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
    if k.size(0):
        launch_write_kv(k, v, k_cache, v_cache, page_table, token_rows, positions)


@write_paged_kv.register_fake
def _(*tensors: Tensor) -> None:
    return None


@custom_op("attend_single_tokens")
def attend_single_tokens(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    scale: float,
    sliding_window: int,
) -> Tensor:
    """Attention of q [T, Hq, D] where no token needs the KV of another one's program; window 0: none."""
    rows = _side_by_side(q).flatten(1)
    return triton_decode.attend_tokens(
        rows, None, k_cache, v_cache, page_table, token_rows, positions, q.size(1), scale, sliding_window
    )


@attend_single_tokens.register_fake
def _(q: Tensor, *others: object) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@custom_op("attend_projected_tokens", mutates_args=("k_cache", "v_cache"))
def attend_projected_tokens(
    rows: Tensor,
    rotary: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    num_heads: int,
    scale: float,
    sliding_window: int,
) -> Tensor:
    """Norm, rotation, KV write and attention of single tokens, from rows [T, (Hq + 2 Hkv) * D].

    Or from float32 [parts, T, (Hq + 2 Hkv) * D] whose sum they are.
    """
    heads = HeadPreparation(rotary, q_norm, k_norm, eps)
    tokens = (k_cache, v_cache, page_table, token_rows, positions)
    if cuda_decode.serves(rows, heads, k_cache, num_heads):
        return cuda_decode.attend_tokens(rows, heads, *tokens, num_heads, scale, sliding_window)
    whole = joined(rows, k_cache.dtype)
    return triton_decode.attend_tokens(whole, heads, *tokens, num_heads, scale, sliding_window)


@attend_projected_tokens.register_fake
def _(
    rows: Tensor,
    rotary: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    num_heads: int,
    scale: float,
    sliding_window: int,
) -> Tensor:
    return k_cache.new_empty(rows.size(-2), num_heads, k_cache.size(3))


@custom_op("attend_behind_prefix", mutates_args=("k_cache", "v_cache"))
def attend_behind_prefix(
    rows: Tensor,
    rotary: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
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
    """`attend_projected_tokens` where all requests begin with the same `prefix_lens[row]` positions."""
    heads = HeadPreparation(rotary, q_norm, k_norm, eps)
    tokens = (k_cache, v_cache, page_table, token_rows, positions, prefix_lens)
    whole = joined(rows, k_cache.dtype)
    return triton_cascade.attend_tokens(whole, heads, *tokens, num_heads, scale, max_context)


@attend_behind_prefix.register_fake
def _(
    rows: Tensor,
    rotary: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
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
    return k_cache.new_empty(rows.size(-2), num_heads, k_cache.size(3))


@custom_op("attend_queries")
def attend_queries(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    req_rows: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    query_lens: Tensor,
    scale: float,
    sliding_window: int,
    max_query_len: int,
    max_context: int,
) -> Tensor:
    """Attention of q [T, Hq, D], any number of tokens per request, the step's KV already written."""
    tokens = (page_table, token_rows, positions)
    requests = (req_rows, seq_lens, query_starts, query_lens)
    limits = (sliding_window, max_query_len, max_context)
    return triton_queries.attend_queries(
        _side_by_side(q), k_cache, v_cache, *tokens, *requests, scale, *limits
    )


@attend_queries.register_fake
def _(q: Tensor, *others: object) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@custom_op("prepare_heads", mutates_args=("k_cache", "v_cache"))
def prepare_heads(
    rows: Tensor,
    rotary: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    num_heads: int,
) -> Tensor:
    """Norm, rotation and KV write: rows [T, (Hq + 2 Hkv) * D] to q [T, Hq, D], k and v into the caches."""
    q = rows.new_empty(rows.size(0), num_heads, k_cache.size(3))
    if rows.size(0):
        launch_prepare_heads(
            rows, q_norm, k_norm, rotary, eps, q, k_cache, v_cache, page_table, token_rows, positions
        )
    return q


@prepare_heads.register_fake
def _(
    rows: Tensor,
    rotary: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    num_heads: int,
) -> Tensor:
    return rows.new_empty(rows.size(0), num_heads, k_cache.size(3))


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch) -> None:
    """Store the step's k and v [T, Hkv, D] at the tokens' slots; padded tokens write to page 0."""
    write_paged_kv(
        k if k.stride(-1) == 1 else k.contiguous(),
        v if v.stride(-1) == 1 else v.contiguous(),
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
    window = sliding_window or 0
    tokens = (batch.page_table, batch.token_rows, batch.positions)
    if batch.max_query_len == 1:
        return attend_single_tokens(q, k_cache, v_cache, *tokens, scale, window)
    requests = (batch.req_rows, batch.seq_lens, batch.query_starts, batch.query_lens)
    limits = (window, batch.max_query_len, batch.max_context)
    return attend_queries(q, k_cache, v_cache, *tokens, *requests, scale, *limits)


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


def attend_rows(
    rows: Tensor,
    heads: HeadPreparation,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: AttentionBatch,
    *,
    num_heads: int,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """From the rows of the QKV projection to attention [T, Hq, D], the step's KV stored on the way.

    The rows may be in parts, as `products.linear_in_parts` returns them.
    """
    if batch.max_query_len > 1:
        rows = joined(rows, k_cache.dtype)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    prepared = (heads.rotary, heads.q_norm, heads.k_norm, heads.eps)
    tokens = (k_cache, v_cache, batch.page_table, batch.token_rows, batch.positions)
    prefix_lens = batch.prefix_lens_for(sliding_window)
    if prefix_lens is not None:
        return attend_behind_prefix(
            rows, *prepared, *tokens, prefix_lens, num_heads, scale, batch.max_context
        )
    if batch.max_query_len == 1:
        return attend_projected_tokens(rows, *prepared, *tokens, num_heads, scale, sliding_window or 0)
    q = prepare_heads(rows, *prepared, *tokens, num_heads)
    return attend(q, k_cache, v_cache, batch, scale=scale, sliding_window=sliding_window)


def _side_by_side(q: Tensor) -> Tensor:
    """q with the heads of a token next to each other; tokens may have gaps between them."""
    return q if q.stride(2) == 1 and q.stride(1) == q.size(2) else q.contiguous()
