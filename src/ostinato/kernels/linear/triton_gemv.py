# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""A matrix times one token's row. Reading the weights is all the work; everything else hides behind it.

A program takes a few rows of the matrix, as much of them as fits into registers before it waits for the
previous kernel. What comes in may be normalised (`norm`); what goes out may be gated (`gated`: silu(first
half) * second half) and added to the residual. The norm's factor is one number per token, so it is applied to
the result, after the product.

Where the token has an adapter (`adapted`), what `lora.triton_shrink` left of it is multiplied with a few more
columns of every row, `b` of its slot, and added before that factor.
"""

import triton
import triton.language as tl

from ..dependent_launch import wait_for_previous


@triton.jit
def load_once(places, mask, even: tl.constexpr):
    """Weights at `places`, not worth keeping in a cache; zeros where `mask` is false."""
    if even:
        return tl.load(places, eviction_policy="evict_first")
    return tl.load(places, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _of_adapter(w, sums, part, start, rank, splits: tl.constexpr, width: tl.constexpr, room: tl.constexpr):
    """w [rows, 16], the columns of `b` from `start` on, times what was left of the token."""
    r = start + tl.arange(0, 16)
    places = sums + part[:, None] * room + r[None, :]
    known = (part[:, None] >= 0) & (r[None, :] < (rank + 15) // 16 * 16)
    v = tl.load(places, mask=known, other=0.0)
    for split in tl.static_range(1, splits):
        v += tl.load(places + split * width, mask=known, other=0.0)
    return tl.sum(w.to(tl.float32) * v, 1)


@triton.jit
def _more_of_adapter(
    sums, rows_of_b, part, in_rows, rank, splits: tl.constexpr, width: tl.constexpr, room: tl.constexpr
):
    """What the ranks behind the first 16 add."""
    y = _of_adapter(
        tl.load(rows_of_b + 16, mask=in_rows[:, None], other=0.0), sums, part, 16, rank, splits, width, room
    )
    for start in range(32, rank, 16):
        w = tl.load(rows_of_b + start, mask=in_rows[:, None], other=0.0)
        y += _of_adapter(w, sums, part, start, rank, splits, width, room)
    return y


@triton.jit
def _gemv(
    x,
    norm_weight,
    weight,
    bias,
    residual,
    out,
    eps,
    sums,
    b,
    ranks,
    slots,
    out_features: tl.constexpr,
    in_features: tl.constexpr,
    norm: tl.constexpr,
    gated: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    adapted: tl.constexpr,
    second_part: tl.constexpr,
    third_part: tl.constexpr,
    splits: tl.constexpr,
    room: tl.constexpr,
    width: tl.constexpr,
    dependent: tl.constexpr,
):
    n = tl.program_id(0) * rows + tl.arange(0, rows)
    k = tl.arange(0, block)
    in_rows = n < out_features
    even: tl.constexpr = in_features % block == 0 and out_features % rows == 0
    inside = in_rows[:, None] & (k < in_features)[None, :]
    place = n.to(tl.int64)[:, None] * in_features + k[None, :]
    w = load_once(weight + place, inside, even)
    second = weight + out_features * in_features
    if gated:
        w_up = load_once(second + place, inside, even)
    if norm:
        g = tl.load(norm_weight + k, mask=k < in_features, other=0.0).to(tl.float32)
    if adapted:
        slot = tl.load(slots)
        rank = tl.where(slot >= 0, tl.load(ranks + tl.maximum(slot, 0)), 0)
        first_row = tl.maximum(slot, 0).to(tl.int64) * (2 * out_features if gated else out_features)
        rows_of_b = b + (first_row + n)[:, None] * room + tl.arange(0, 16)[None, :]
        is_changed = (n < tl.where(rank > 0, out_features, 0))[:, None]
        low = tl.load(rows_of_b, mask=is_changed, other=0.0)
        part = (n >= second_part).to(tl.int32) + (n >= third_part).to(tl.int32)
        if gated:
            low_up = tl.load(rows_of_b + out_features * room, mask=is_changed, other=0.0)
    wait_for_previous(dependent)
    if adapted:
        delta = _of_adapter(low, sums, part, 0, rank, splits, width, room)
        if gated:
            delta_up = _of_adapter(low_up, sums, part + 1, 0, rank, splits, width, room)
    v = tl.load(x + k, mask=k < in_features, other=0.0).to(tl.float32)
    squares = v * v
    if norm:
        v = v * g
    acc = w.to(tl.float32) * v[None, :]
    if gated:
        acc_up = w_up.to(tl.float32) * v[None, :]
    for start in range(block, in_features, block):
        in_block = start + k < in_features
        inside = in_rows[:, None] & in_block[None, :]
        w = load_once(weight + start + place, inside, even)
        v = tl.load(x + start + k, mask=in_block, other=0.0).to(tl.float32)
        if norm:
            squares += v * v
            v = v * tl.load(norm_weight + start + k, mask=in_block, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * v[None, :]
        if gated:
            w_up = load_once(second + start + place, inside, even)
            acc_up += w_up.to(tl.float32) * v[None, :]
    y = tl.sum(acc, 1)
    if gated:
        y_up = tl.sum(acc_up, 1)
    if adapted:
        if rank > 0:
            y += delta
            if gated:
                y_up += delta_up
        if room > 16:  # noqa: SIM102 (the one is known to the compiler)
            if rank > 16:
                y += _more_of_adapter(sums, rows_of_b, part, in_rows, rank, splits, width, room)
                if gated:
                    up_of_b = rows_of_b + out_features * room
                    y_up += _more_of_adapter(sums, up_of_b, part + 1, in_rows, rank, splits, width, room)
    if norm:
        factor = tl.rsqrt(tl.sum(squares, 0) / in_features + eps)
        y = y * factor
        if gated:
            y_up = y_up * factor
    if has_bias:
        y += tl.load(bias + n, mask=in_rows, other=0.0).to(tl.float32)
        if gated:
            y_up += tl.load(bias + out_features + n, mask=in_rows, other=0.0).to(tl.float32)
    if gated:
        y = y / (1.0 + tl.exp(-y)) * y_up
    if has_residual:
        y += tl.load(residual + n, mask=in_rows, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), in_rows)
