# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""From the QKV projection to what attention takes: norm, rotation and the KV write in one pass.

    qkv of a token   | q heads ... | k heads ... | v heads ... |
    goes to          | q_out       | k_cache     | v_cache     |

A program takes a few tokens and a block of heads of one kind, each head as its two halves: what is turned in
one half goes into the other, and a token's angles serve all its heads.
"""

import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..dependent_launch import wait_for_previous
from ..host_sizes import cdiv, next_power_of_2
from .batch import PAGE_SIZE
from .heads import HeadPreparation
from .triton_tiles import INDEX_BUFFERS

_TOKENS_AT_A_TIME = 4
_HEADS_AT_A_TIME = 8
_WARPS = 4


@triton.jit(do_not_specialize=("num_tokens",), do_not_specialize_on_alignment=INDEX_BUFFERS)
def _prepare_heads(
    qkv,
    q_norm,
    k_norm,
    rotary,
    q_out,
    k_cache,
    v_cache,
    page_table,
    token_rows,
    positions,
    eps,
    num_tokens,
    token_stride,
    page_table_stride,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    has_norm: tl.constexpr,
    token_block: tl.constexpr,
    head_block: tl.constexpr,
    dim_block: tl.constexpr,
    dependent: tl.constexpr,
):
    half: tl.constexpr = head_dim // 2
    q_blocks: tl.constexpr = (num_heads + head_block - 1) // head_block
    kv_blocks: tl.constexpr = (num_kv_heads + head_block - 1) // head_block
    block = tl.program_id(1)
    token = (tl.program_id(0) * token_block + tl.arange(0, token_block)).to(tl.int64)
    dims = tl.arange(0, dim_block // 2)
    is_token, in_half = token < num_tokens, dims < half
    position = tl.load(positions + token, mask=is_token, other=0)
    angles = rotary + position[:, None] * head_dim + dims[None, :]
    cos = tl.load(angles, mask=is_token[:, None] & in_half[None, :], other=0.0)[:, None, :]
    sin = tl.load(angles + half, mask=is_token[:, None] & in_half[None, :], other=0.0)[:, None, :]
    if has_norm:
        norm = q_norm if block < q_blocks else k_norm
        first_weight = tl.load(norm + dims, mask=in_half, other=0.0).to(tl.float32)[None, None, :]
        second_weight = tl.load(norm + half + dims, mask=in_half, other=0.0).to(tl.float32)[None, None, :]
    else:
        first_weight, second_weight = None, None
    table_row = tl.load(token_rows + token, mask=is_token, other=0).to(tl.int64)
    page = tl.load(page_table + table_row * page_table_stride + position // page_size).to(tl.int64)
    slot = page * page_size + position % page_size
    wait_for_previous(dependent)
    source = qkv + token[:, None, None] * token_stride + dims[None, None, :]
    real = is_token[:, None, None] & in_half[None, None, :]
    if block < q_blocks:
        head = (block * head_block + tl.arange(0, head_block))[None, :, None]
        wanted = real & (head < num_heads)
        first = tl.load(source + head * head_dim, mask=wanted, other=0.0)
        second = tl.load(source + head * head_dim + half, mask=wanted, other=0.0)
        first, second = _turned(
            first, second, first_weight, second_weight, cos, sin, eps, head_dim, has_norm
        )
        target = q_out + (token[:, None, None] * num_heads + head) * head_dim + dims[None, None, :]
        tl.store(target, first.to(q_out.dtype.element_ty), wanted)
        tl.store(target + half, second.to(q_out.dtype.element_ty), wanted)
        return
    is_value = (block - q_blocks) // kv_blocks
    head = ((block - q_blocks) % kv_blocks * head_block + tl.arange(0, head_block))[None, :, None]
    wanted = real & (head < num_kv_heads)
    source += (num_heads + is_value * num_kv_heads + head) * head_dim
    first = tl.load(source, mask=wanted, other=0.0)
    second = tl.load(source + half, mask=wanted, other=0.0)
    place = (slot[:, None, None] * num_kv_heads + head) * head_dim + dims[None, None, :]
    if is_value:
        tl.store(v_cache + place, first.to(v_cache.dtype.element_ty), wanted)
        tl.store(v_cache + place + half, second.to(v_cache.dtype.element_ty), wanted)
        return
    first, second = _turned(first, second, first_weight, second_weight, cos, sin, eps, head_dim, has_norm)
    tl.store(k_cache + place, first.to(k_cache.dtype.element_ty), wanted)
    tl.store(k_cache + place + half, second.to(k_cache.dtype.element_ty), wanted)


@triton.jit
def _turned(
    first, second, first_weight, second_weight, cos, sin, eps, head_dim: tl.constexpr, has_norm: tl.constexpr
):
    """Both halves of heads [tokens, heads, dims], normalised and rotated, in float32."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    if has_norm:
        factor = tl.rsqrt(tl.sum(a * a + b * b, 2) / head_dim + eps)[:, :, None]
        # Rounded here like a norm that is a step of its own.
        a = (a * factor * first_weight).to(first.dtype).to(tl.float32)
        b = (b * factor * second_weight).to(first.dtype).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


def prepare_heads(
    qkv: Tensor,
    heads: HeadPreparation,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    token_rows: Tensor,
    positions: Tensor,
    num_heads: int,
) -> Tensor:
    """qkv [T, (Hq + 2 Hkv) * D] to queries [T, Hq, D], keys and values into the caches."""
    num_tokens, num_kv_heads, head_dim = qkv.size(0), k_cache.size(2), k_cache.size(3)
    q_out = qkv.new_empty(num_tokens, num_heads, head_dim)
    if not num_tokens:
        return q_out
    head_block = min(_HEADS_AT_A_TIME, next_power_of_2(num_heads))
    blocks = cdiv(num_heads, head_block) + 2 * cdiv(num_kv_heads, head_block)
    _prepare_heads[(cdiv(num_tokens, _TOKENS_AT_A_TIME), blocks)](
        qkv,
        qkv if heads.q_norm is None else heads.q_norm,
        qkv if heads.k_norm is None else heads.k_norm,
        heads.rotary,
        q_out,
        k_cache,
        v_cache,
        page_table,
        token_rows,
        positions,
        heads.eps,
        num_tokens,
        qkv.stride(0),
        page_table.stride(0),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=PAGE_SIZE,
        has_norm=heads.q_norm is not None,
        token_block=_TOKENS_AT_A_TIME,
        head_block=head_block,
        dim_block=max(16, next_power_of_2(head_dim)),
        num_warps=_WARPS,
        enable_fp_fusion=True,
        **dependent_launch.options(qkv.device),
    )
    return q_out
