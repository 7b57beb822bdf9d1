# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Storing keys and values that are ready, at the slots of their tokens."""

import triton
import triton.language as tl
from torch import Tensor

from .batch import PAGE_SIZE
from .triton_tiles import INDEX_BUFFERS


@triton.jit(do_not_specialize_on_alignment=INDEX_BUFFERS)
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


def launch_write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    token_rows: Tensor,
    positions: Tensor,
) -> None:
    """Queue the kernel; k and v [T, Hkv, D] may be views whose last dimension is dense."""
    num_tokens, num_kv_heads, head_dim = k.shape
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
        enable_fp_fusion=True,
    )
