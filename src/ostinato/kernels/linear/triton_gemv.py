# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""A matrix times one token's row. Reading the weights is all the work; everything else hides behind it.

A CTA takes a few rows of the matrix, as much of them as fits into registers before it waits for the
previous kernel. What comes in may be normalised (`norm`); what goes out may be gated (`gated`: silu(first
half) * second half) and added to the residual. The norm's factor is one number per token, so it is applied to
the result, after the product.

Where the token has an adapter (`adapted`), what that adds is there already, and is added before that factor.
"""

import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..dependent_launch import wait_for_previous
from ..host_sizes import cdiv
from ..lora.low_rank import Deltas
from ..on_chip_memory import prefer_l1
from .cuda_few_tokens import FusedLayer
from .tiles import GemvTile


@triton.jit
def load_once(places, mask, even: tl.constexpr):
    """Weights at `places`, not worth keeping in a cache; zeros where `mask` is false."""
    if even:
        return tl.load(places, eviction_policy="evict_first")
    return tl.load(places, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _gemv(
    x,
    norm_weight,
    weight,
    bias,
    residual,
    out,
    eps,
    deltas,
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
    wait_for_previous(dependent)
    v = tl.load(x + k, mask=k < in_features, other=0.0).to(tl.float32)
    if adapted:
        # Read before it is known whether it counts: there is room for it in any case.
        delta = tl.load(deltas + n, mask=in_rows, other=0.0)
        if gated:
            delta_up = tl.load(deltas + out_features + n, mask=in_rows, other=0.0)
        has_adapter = tl.load(slots) >= 0
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
        y = tl.where(has_adapter, y + delta, y)
        if gated:
            y_up = tl.where(has_adapter, y_up + delta_up, y_up)
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


def launch_triton_gemv(layer: FusedLayer, out: Tensor, tile: GemvTile, deltas: Deltas | None = None) -> None:
    """Queues the kernel for one token; operands are dense."""
    x, weight, bias, norm_weight, eps, gated, residual, _ = layer
    launched = _gemv[(cdiv(out.size(1), tile.rows),)](
        x,
        x if norm_weight is None else norm_weight,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        eps,
        *(deltas or (x, x)),
        out_features=out.size(1),
        in_features=x.size(1),
        norm=norm_weight is not None,
        gated=gated,
        has_bias=bias is not None,
        has_residual=residual is not None,
        rows=tile.rows,
        block=tile.block,
        adapted=deltas is not None,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
        **dependent_launch.options(x.device),
    )
    prefer_l1(launched)
