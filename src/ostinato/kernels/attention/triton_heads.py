# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""From the QKV projection to what attention takes: norm, rotation and the KV write in one pass.

    qkv of a token   | q heads ... | k heads ... | v heads ... |
    goes to          | q_out       | k_cache     | v_cache     |

A CTA takes a few tokens and a block of heads of one kind, as two halves: element i of a head turns
together with i + D/2, so each is read once, and the angles of a token serve all its heads.
"""

import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..dependent_launch import wait_for_previous
from ..host_sizes import cdiv, next_power_of_2
from .batch import PAGE_SIZE, HeadPreparation, PagedTokens
from .triton_tiles import INDEX_BUFFERS

_TOKENS_AT_A_TIME = 4
_HEADS_AT_A_TIME = 8


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
    half_block: tl.constexpr,
    dependent: tl.constexpr,
):
    half: tl.constexpr = head_dim // 2
    token = (tl.program_id(0) * token_block + tl.arange(0, token_block)).to(tl.int64)
    is_token = token < num_tokens
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (num_heads + head_block - 1) // head_block
    kv_blocks: tl.constexpr = (num_kv_heads + head_block - 1) // head_block
    position = tl.load(positions + token, mask=is_token, other=0)
    dims = tl.arange(0, half_block)
    in_half = dims < half
    turn = rotary + position.to(tl.int64)[:, None] * head_dim + dims[None, :]
    cos = tl.load(turn, mask=in_half[None, :], other=0.0)[:, None, :]
    sin = tl.load(turn + half, mask=in_half[None, :], other=0.0)[:, None, :]
    if has_norm:
        norm = (q_norm if block < q_blocks else k_norm) + dims
        first_weight = tl.load(norm, mask=in_half, other=0.0).to(tl.float32)[None, None, :]
        second_weight = tl.load(norm + half, mask=in_half, other=0.0).to(tl.float32)[None, None, :]
    wait_for_previous(dependent)
    if block < q_blocks:
        kind_block, kind_heads, before = block, num_heads, 0
    elif block < q_blocks + kv_blocks:
        kind_block, kind_heads, before = block - q_blocks, num_kv_heads, num_heads
    else:
        kind_block, kind_heads, before = block - q_blocks - kv_blocks, num_kv_heads, num_heads + num_kv_heads
    head = kind_block * head_block + tl.arange(0, head_block)
    real = (is_token[:, None] & (head < kind_heads)[None, :])[:, :, None] & in_half[None, None, :]
    in_token = (head * head_dim)[None, :, None] + dims[None, None, :]
    source = qkv + (token * token_stride + before * head_dim)[:, None, None] + in_token
    a = tl.load(source, mask=real, other=0.0).to(tl.float32)
    b = tl.load(source + half, mask=real, other=0.0).to(tl.float32)
    if block < q_blocks + kv_blocks:
        if has_norm:
            factor = tl.rsqrt(tl.sum(a * a + b * b, 2) / head_dim + eps)[:, :, None]
            # Rounded here like a norm that is a step of its own.
            a = (a * factor * first_weight).to(qkv.dtype.element_ty).to(tl.float32)
            b = (b * factor * second_weight).to(qkv.dtype.element_ty).to(tl.float32)
        a, b = a * cos - b * sin, b * cos + a * sin
    if block < q_blocks:
        target = q_out + (token * (num_heads * head_dim))[:, None, None] + in_token
        tl.store(target, a.to(q_out.dtype.element_ty), real)
        tl.store(target + half, b.to(q_out.dtype.element_ty), real)
        return
    table_row = tl.load(token_rows + token, mask=is_token, other=0).to(tl.int64)
    page = tl.load(page_table + table_row * page_table_stride + position // page_size).to(tl.int64)
    slot = page * page_size + position % page_size
    cache = k_cache if block < q_blocks + kv_blocks else v_cache
    target = cache + (slot * (num_kv_heads * head_dim))[:, None, None] + in_token
    tl.store(target, a.to(k_cache.dtype.element_ty), real)
    tl.store(target + half, b.to(k_cache.dtype.element_ty), real)


def prepare_heads(
    qkv: Tensor,
    heads: HeadPreparation,
    tokens: PagedTokens,
    num_heads: int,
) -> Tensor:
    """qkv [T, (Hq + 2 Hkv) * D] to queries [T, Hq, D], keys and values into the caches."""
    k_cache, v_cache, page_table, token_rows, positions = tokens
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
        half_block=max(8, next_power_of_2(head_dim // 2)),
        num_warps=4,
        enable_fp_fusion=True,
        **dependent_launch.options(qkv.device),
    )
    return q_out
