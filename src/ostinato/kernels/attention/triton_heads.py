# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""From the QKV projection to what attention takes: norm, rotation and the KV write in one pass.

    qkv of a token   | q heads ... | k heads ... | v heads ... |
    goes to          | q_out       | k_cache     | v_cache     |

A program takes a few tokens and a block of heads of one kind.
"""

import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..dependent_launch import wait_for_previous
from ..host_sizes import cdiv, next_power_of_2
from .batch import PAGE_SIZE
from .heads import HeadPreparation
from .triton_tiles import INDEX_BUFFERS, load_heads, load_norm, load_turn, turned

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
    dim_block: tl.constexpr,
    dependent: tl.constexpr,
):
    place = tl.arange(0, token_block * head_block)
    token = (tl.program_id(0) * token_block + place // head_block).to(tl.int64)
    is_token = token < num_tokens
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (num_heads + head_block - 1) // head_block
    kv_blocks: tl.constexpr = (num_kv_heads + head_block - 1) // head_block
    position = tl.load(positions + token, mask=is_token, other=0)
    dims = tl.arange(0, dim_block)[None, :]
    cos, sin = load_turn(rotary, position, head_dim, dim_block)
    if has_norm:
        weight_x, weight_y = load_norm(q_norm if block < q_blocks else k_norm, head_dim, dim_block)
    else:
        weight_x, weight_y = None, None
    wait_for_previous(dependent)
    if block < q_blocks:
        head = block * head_block + place % head_block
        real = is_token & (head < num_heads)
        x, y = load_heads(qkv + token * token_stride + head * head_dim, real, head_dim, dim_block)
        q = turned(x, y, weight_x, weight_y, cos, sin, eps, head_dim, has_norm)
        target = q_out + (token * num_heads + head)[:, None] * head_dim + dims
        tl.store(target, q.to(q_out.dtype.element_ty), real[:, None] & (dims < head_dim))
        return
    table_row = tl.load(token_rows + token, mask=is_token, other=0).to(tl.int64)
    page = tl.load(page_table + table_row * page_table_stride + position // page_size).to(tl.int64)
    slot = page * page_size + position % page_size
    if block < q_blocks + kv_blocks:
        head = (block - q_blocks) * head_block + place % head_block
        real = is_token & (head < num_kv_heads)
        source = qkv + token * token_stride + (num_heads + head) * head_dim
        x, y = load_heads(source, real, head_dim, dim_block)
        k = turned(x, y, weight_x, weight_y, cos, sin, eps, head_dim, has_norm)
        target = k_cache + (slot * num_kv_heads + head)[:, None] * head_dim + dims
        tl.store(target, k.to(k_cache.dtype.element_ty), real[:, None] & (dims < head_dim))
    else:
        head = (block - q_blocks - kv_blocks) * head_block + place % head_block
        mask = (is_token & (head < num_kv_heads))[:, None] & (dims < head_dim)
        source = qkv + token * token_stride + (num_heads + num_kv_heads + head) * head_dim
        value = tl.load(source[:, None] + dims, mask=mask, other=0.0)
        target = v_cache + (slot * num_kv_heads + head)[:, None] * head_dim + dims
        tl.store(target, value.to(v_cache.dtype.element_ty), mask)


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
        num_warps=4,
        enable_fp_fusion=True,
        **dependent_launch.options(qkv.device),
    )
    return q_out
