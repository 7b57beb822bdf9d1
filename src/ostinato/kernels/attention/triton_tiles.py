# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Tiles that the attention kernels share: heads ready to attend, keys and values from their pages."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
"""Softmax is computed in powers of two."""

INDEX_BUFFERS = ("page_table", "token_rows", "positions")
"""Views of these may begin anywhere; specialising on their alignment would compile while serving."""

PARTS_AT_A_TIME = 32
"""That are joined."""


@triton.jit
def load_heads(places, real, head_dim: tl.constexpr, dim_block: tl.constexpr):
    """Heads at pointers `places` [n], each element beside its partner of the rotation: two [n, dim_block].

    Element i turns together with i +- head_dim / 2; loading it a second time needs no exchange of registers.
    """
    half: tl.constexpr = head_dim // 2
    dims = tl.arange(0, dim_block)
    partner = tl.where(dims < half, dims + half, dims - half)
    mask = real[:, None] & (dims < head_dim)[None, :]
    x = tl.load(places[:, None] + dims[None, :], mask=mask, other=0.0)
    y = tl.load(places[:, None] + partner[None, :], mask=mask, other=0.0)
    return x, y


@triton.jit
def load_turn(rotary, position, head_dim: tl.constexpr, dim_block: tl.constexpr):
    """cos and signed sin of positions [n], each [n, dim_block]."""
    half: tl.constexpr = head_dim // 2
    dims = tl.arange(0, dim_block)[None, :]
    turn = rotary + position.to(tl.int64)[:, None] * head_dim
    cos = tl.load(turn + dims % half, mask=dims < head_dim, other=0.0)
    sin = tl.load(turn + half + dims % half, mask=dims < head_dim, other=0.0)
    return cos, tl.where(dims < half, -sin, sin)


@triton.jit
def load_norm(norm_weight, head_dim: tl.constexpr, dim_block: tl.constexpr):
    """A head's norm weight, and that of the partners, each [dim_block]."""
    half: tl.constexpr = head_dim // 2
    dims = tl.arange(0, dim_block)
    partner = tl.where(dims < half, dims + half, dims - half)
    in_head = dims < head_dim
    x = tl.load(norm_weight + dims, mask=in_head, other=0.0).to(tl.float32)
    y = tl.load(norm_weight + partner, mask=in_head, other=0.0).to(tl.float32)
    return x, y


@triton.jit
def turned(x, y, x_weight, y_weight, cos, sin, eps, head_dim: tl.constexpr, has_norm: tl.constexpr):
    """Heads x with partners y, normalised and rotated, in float32."""
    a, b = x.to(tl.float32), y.to(tl.float32)
    if has_norm:
        factor = tl.rsqrt(tl.sum(a * a, 1) / head_dim + eps)[:, None]
        # Rounded here like a norm that is a step of its own.
        a = (a * factor * x_weight[None, :]).to(x.dtype).to(tl.float32)
        b = (b * factor * y_weight[None, :]).to(x.dtype).to(tl.float32)
    return a * cos + b * sin


@triton.jit
def keys_and_values(
    k_cache,
    v_cache,
    pages,
    start,
    end,
    kv_head,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    key_block: tl.constexpr,
    dim_block: tl.constexpr,
):
    """Tiles [key_block, dim_block] of the positions from `start` on; zeros from `end` on."""
    key = start + tl.arange(0, key_block)
    dims = tl.arange(0, dim_block)
    in_context = key < end
    page = tl.load(pages + key // page_size, mask=in_context, other=0).to(tl.int64)
    places = ((page * page_size + key % page_size) * num_kv_heads + kv_head) * head_dim
    wanted = in_context[:, None]
    if dim_block != head_dim:
        wanted = wanted & (dims < head_dim)[None, :]
    k_tile = tl.load(k_cache + places[:, None] + dims[None, :], mask=wanted, other=0.0)
    v_tile = tl.load(v_cache + places[:, None] + dims[None, :], mask=wanted, other=0.0)
    return k_tile, v_tile


@triton.jit
def fold_in(
    q_tile,
    k_tile,
    v_tile,
    key,
    position,
    end,
    best,
    total,
    acc,
    scale,
    window: tl.constexpr,
    masked: tl.constexpr,
):
    """One block of keys into the running softmax."""
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
    if masked:
        visible = (key[None, :] <= position[:, None]) & (key < end)[None, :]
        if window > 0:
            visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    shift = new_best
    if masked:
        # A query may have seen nothing yet: -inf minus -inf would be NaN.
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - shift[:, None])
    faded = tl.exp2(best - shift)
    total = total * faded + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * faded[:, None], input_precision="ieee")
    return new_best, total, acc


@triton.jit
def attend_to_keys(
    q_tile,
    position,
    first_position,
    last_position,
    begin,
    end,
    k_cache,
    v_cache,
    pages,
    kv_head,
    scale,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    page_size: tl.constexpr,
    window: tl.constexpr,
    key_block: tl.constexpr,
    dim_block: tl.constexpr,
):
    """(best, total, acc) of queries at `position` [n] over the positions from `begin`, a multiple of a block,
    to `end`. Blocks that all queries between `first_position` and `last_position` see need no mask."""
    offsets = tl.arange(0, key_block)
    best = tl.full([q_tile.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q_tile.shape[0]], tl.float32)
    acc = tl.zeros([q_tile.shape[0], dim_block], tl.float32)
    begin_whole = begin
    end_whole = tl.maximum(tl.minimum(first_position + 1, end) // key_block * key_block, begin)
    if window > 0:
        begin_whole = tl.cdiv(tl.maximum(0, last_position + 1 - window), key_block) * key_block
        begin_whole = tl.minimum(tl.maximum(begin_whole, begin), end_whole)
        for start in range(begin, begin_whole, key_block):
            k_tile, v_tile = keys_and_values(
                k_cache, v_cache, pages, start, end, kv_head,
                num_kv_heads, head_dim, page_size, key_block, dim_block,
            )  # fmt: skip
            best, total, acc = fold_in(
                q_tile, k_tile, v_tile, start + offsets, position, end, best, total, acc, scale, window, True
            )
    for start in range(begin_whole, end_whole, key_block):
        k_tile, v_tile = keys_and_values(
            k_cache, v_cache, pages, start, end, kv_head,
            num_kv_heads, head_dim, page_size, key_block, dim_block,
        )  # fmt: skip
        best, total, acc = fold_in(
            q_tile, k_tile, v_tile, start + offsets, position, end, best, total, acc, scale, window, False
        )
    for start in range(end_whole, end, key_block):
        k_tile, v_tile = keys_and_values(
            k_cache, v_cache, pages, start, end, kv_head,
            num_kv_heads, head_dim, page_size, key_block, dim_block,
        )  # fmt: skip
        best, total, acc = fold_in(
            q_tile, k_tile, v_tile, start + offsets, position, end, best, total, acc, scale, window, True
        )
    return best, total, acc


@triton.jit
def fold_parts(
    partial,
    partial_lse,
    first,
    count,
    best,
    total,
    acc,
    head_dim: tl.constexpr,
    part_block: tl.constexpr,
    dim_block: tl.constexpr,
):
    """`count` parts of a head's context, from number `first` on, into (best [1], total [1], acc [dims])."""
    dims = tl.arange(0, dim_block)
    in_head = dims < head_dim
    for done in range(0, count, part_block):
        part = done + tl.arange(0, part_block)
        written = part < count
        lse = tl.load(partial_lse + first + part, mask=written, other=float("-inf"))
        values = tl.load(
            partial + (first + part)[:, None] * head_dim + dims[None, :],
            mask=written[:, None] & in_head[None, :],
            other=0.0,
        )
        new_best = tl.maximum(best, tl.max(lse, 0))
        weights = tl.exp2(lse - new_best)
        faded = tl.exp2(best - new_best)
        total = total * faded + tl.sum(weights, 0)
        acc = acc * faded + tl.sum(values * weights[:, None], 0)
        best = new_best
    return best, total, acc
