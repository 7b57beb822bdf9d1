# mypy: allow-untyped-defs, disable-error-code="assignment, var-annotated"
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""A matrix times up to 16 tokens, its weights in registers before the tokens are known.

A program takes a few rows of the matrix with all their columns, and loads them before it waits for the
previous kernel. The columns lie in `slices` side by side: warps that would find too few rows to share each
take a part of the sum, and the parts are joined at the end.

    slices = 2    x [2, tokens, width] . w [2, width, rows]  ->  acc [2, tokens, rows]  ->  sum over 2
    chunks        as many such steps as the columns need

Norm, gate, bias and residual are as in `triton_gemv`.
"""

import triton
import triton.language as tl

from ..dependent_launch import wait_for_previous


@triton.jit
def load_tile(places, mask, even: tl.constexpr):
    """What is at `places`; zeros where `mask` is false, which it never is in an even division of work."""
    if even:
        return tl.load(places)
    return tl.load(places, mask=mask, other=0.0)


@triton.jit(do_not_specialize=("num_tokens",))
def _resident(
    x,
    norm_weight,
    weight,
    bias,
    residual,
    out,
    num_tokens,
    eps,
    out_features: tl.constexpr,
    in_features: tl.constexpr,
    norm: tl.constexpr,
    gated: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    tokens: tl.constexpr,
    rows: tl.constexpr,
    slices: tl.constexpr,
    width: tl.constexpr,
    dependent: tl.constexpr,
):
    n = tl.program_id(0) * rows + tl.arange(0, rows)
    in_rows = n < out_features
    step: tl.constexpr = slices * width
    chunks: tl.constexpr = (in_features + step - 1) // step
    even: tl.constexpr = in_features % step == 0 and out_features % rows == 0
    k = tl.arange(0, slices)[:, None] * width + tl.arange(0, width)[None, :]
    place = n.to(tl.int64)[None, :, None] * in_features + k[:, None, :]
    second = weight + out_features * in_features
    w = ()
    w_up = ()
    g = ()
    for chunk in tl.static_range(chunks):
        in_k = chunk * step + k < in_features
        inside = in_rows[None, :, None] & in_k[:, None, :]
        w = w + (load_tile(weight + chunk * step + place, inside, even),)  # noqa: RUF005
        if gated:
            w_up = w_up + (load_tile(second + chunk * step + place, inside, even),)  # noqa: RUF005
        if norm:
            g = g + (load_tile(norm_weight + chunk * step + k, in_k, even),)  # noqa: RUF005
    wait_for_previous(dependent)

    token = tl.arange(0, tokens)
    real = token < num_tokens
    source = token[None, :, None] * in_features + k[:, None, :]
    v = ()
    for chunk in tl.static_range(chunks):
        # Surplus tokens are masked: all programs reading one row in their place would queue up for it.
        inside = real[None, :, None]
        if in_features % step != 0:
            inside = inside & (chunk * step + k < in_features)[:, None, :]
        v = v + (tl.load(x + chunk * step + source, mask=inside, other=0.0),)  # noqa: RUF005
    acc = tl.zeros([slices, tokens, rows], tl.float32)
    acc_up = tl.zeros([slices, tokens, rows], tl.float32)
    squares = tl.zeros([slices, tokens], tl.float32)
    for chunk in tl.static_range(chunks):
        tile = v[chunk]
        if norm:
            wide = tile.to(tl.float32)
            squares += tl.sum(wide * wide, 2)
            tile = (wide * g[chunk].to(tl.float32)[:, None, :]).to(weight.dtype.element_ty)
        acc = tl.dot(tile, tl.permute(w[chunk], (0, 2, 1)), acc, input_precision="ieee")
        if gated:
            acc_up = tl.dot(tile, tl.permute(w_up[chunk], (0, 2, 1)), acc_up, input_precision="ieee")
    y, y_up = tl.sum(acc, 0), tl.sum(acc_up, 0)
    if norm:
        factor = tl.rsqrt(tl.sum(squares, 0) / in_features + eps)[:, None]
        y, y_up = y * factor, y_up * factor
    if has_bias:
        y += tl.load(bias + n, mask=in_rows, other=0.0).to(tl.float32)[None, :]
        if gated:
            y_up += tl.load(bias + out_features + n, mask=in_rows, other=0.0).to(tl.float32)[None, :]
    if gated:
        y = y / (1.0 + tl.exp(-y)) * y_up
    target = token[:, None] * out_features + n[None, :]
    mask = real[:, None] & in_rows[None, :]
    if has_residual:
        y += tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + target, y.to(out.dtype.element_ty), mask)
