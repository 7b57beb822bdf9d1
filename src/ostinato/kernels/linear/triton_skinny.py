# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""A matrix times some dozens of tokens: the weights stream by once, the tensor cores take all tokens at once.

A program takes a block of the matrix's rows and a block of the tokens. Its weights are asked into L2 before
it waits for the previous kernel. `gated` is silu(first half of the rows) * second half.
"""

import triton
import triton.language as tl

from ..dependent_launch import prefetch_to_l2, wait_for_previous
from .triton_resident import load_tile


@triton.jit(do_not_specialize=("num_tokens",))
def _skinny(
    x,
    weight,
    bias,
    out,
    num_tokens,
    out_features: tl.constexpr,
    in_features: tl.constexpr,
    gated: tl.constexpr,
    has_bias: tl.constexpr,
    tokens: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    prefetch: tl.constexpr,
    dependent: tl.constexpr,
):
    first_row = tl.program_id(1).to(tl.int64) * rows
    n = first_row + tl.arange(0, rows)
    in_rows = n < out_features
    second = weight + out_features * in_features
    if prefetch:
        prefetch_to_l2(weight + first_row * in_features, rows * in_features * 2, dependent)
        if gated:
            prefetch_to_l2(second + first_row * in_features, rows * in_features * 2, dependent)
    token = tl.program_id(0) * tokens + tl.arange(0, tokens)
    real = token < num_tokens
    source = token[:, None] * in_features
    even: tl.constexpr = out_features % rows == 0 and in_features % block == 0
    wait_for_previous(dependent)

    acc = tl.zeros([tokens, rows], tl.float32)
    acc_up = tl.zeros([tokens, rows], tl.float32)
    for start in range(0, in_features, block):
        k = start + tl.arange(0, block)
        in_k = k < in_features
        # Surplus tokens are masked: all programs reading one row in their place would queue up for it.
        known = real[:, None]
        if in_features % block != 0:
            known = known & in_k[None, :]
        tile = tl.load(x + source + k[None, :], mask=known, other=0.0)
        place = n[None, :] * in_features + k[:, None]
        inside = in_k[:, None] & in_rows[None, :]
        acc = tl.dot(tile, load_tile(weight + place, inside, even), acc, input_precision="ieee")
        if gated:
            acc_up = tl.dot(tile, load_tile(second + place, inside, even), acc_up, input_precision="ieee")

    if has_bias:
        acc += tl.load(bias + n, mask=in_rows, other=0.0).to(tl.float32)[None, :]
        if gated:
            acc_up += tl.load(bias + out_features + n, mask=in_rows, other=0.0).to(tl.float32)[None, :]
    y = acc
    if gated:
        y = acc / (1.0 + tl.exp(-acc)) * acc_up
    target = token.to(tl.int64)[:, None] * out_features + n[None, :]
    tl.store(out + target, y.to(out.dtype.element_ty), real[:, None] & in_rows[None, :])
