# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Kernels that work on rows one by one: residual add + norm, gate. See `rows`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import dependent_launch
from ..custom_op import custom_op
from ..dependent_launch import wait_for_previous
from ..host_sizes import cdiv, next_power_of_2
from . import SQUARES_TOGETHER, empty_scaled

_GATE_BLOCK = 1024


@triton.jit(do_not_specialize=("num_rows",))
def _add_rms_norm(
    x,
    residual,
    weight,
    normed,
    deltas,
    slots,
    eps,
    num_rows,
    width: tl.constexpr,
    block: tl.constexpr,
    parts: tl.constexpr,
    has_residual: tl.constexpr,
    has_deltas: tl.constexpr,
    dependent: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    k = tl.arange(0, block)
    inside = k < width
    scale = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(dependent)
    if has_deltas:
        is_added = k < tl.where(tl.load(slots + tl.program_id(0)) >= 0, width, 0)
        delta = tl.load(deltas + row + k, mask=is_added, other=0.0)
    v = tl.load(x + row + k, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        v += tl.load(x + part * num_rows * width + row + k, mask=inside, other=0.0).to(tl.float32)
    if has_deltas:
        v = tl.where(is_added, v + delta, v)  # others keep their bits
    if has_residual:
        v += tl.load(residual + row + k, mask=inside, other=0.0).to(tl.float32)
        total = v.to(residual.dtype.element_ty)
        v = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(v * v, 0) / width + eps)
    if has_residual:
        tl.store(residual + row + k, total, inside)  # behind the sum, for which all threads have read theirs
    tl.store(normed + row + k, (v * factor * scale).to(normed.dtype.element_ty), inside)


@triton.jit(do_not_specialize=("num_rows",))
def _scale_rows(
    x,
    weight,
    scaled,
    squares,
    num_rows,
    width: tl.constexpr,
    together: tl.constexpr,
    block: tl.constexpr,
    dependent: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, block)
    inside = k < width
    scale = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(dependent)
    v = tl.load(x + row * width + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled + row * width + k, (v * scale).to(scaled.dtype.element_ty), inside)
    sums = tl.sum((v * v).reshape(block // together, together), 1)
    part = tl.arange(0, block // together)
    tl.store(squares + part * num_rows + row, sums, part < width // together)


@triton.jit
def _silu_mul(gate_up, width: tl.constexpr, block: tl.constexpr, dependent: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * block + tl.arange(0, block)
    inside = k < width
    wait_for_previous(dependent)
    place = gate_up + row * (2 * width) + k
    gate = tl.load(place, mask=inside, other=0.0)
    up = tl.load(place + width, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded in between, as two steps of their own would.
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(place, (silu * up.to(tl.float32)).to(gate.dtype), inside)


def _norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    has_residual: bool,
    deltas: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    normed = torch.empty_like(residual)
    width = x.size(-1)
    num_rows = residual.numel() // width
    block = next_power_of_2(width)
    _add_rms_norm[(num_rows,)](
        x,
        residual,
        weight,
        normed,
        *(deltas or (x, x)),
        eps,
        num_rows,
        width=width,
        block=block,
        parts=x.size(0) if x.dim() > residual.dim() else 1,
        has_residual=has_residual,
        has_deltas=deltas is not None,
        num_warps=8 if block >= 4096 else 4,
        enable_fp_fusion=True,
        **dependent_launch.options(x.device, plain=deltas is not None),
    )
    return normed


@custom_op("add_rms_norm", mutates_args=("residual",), result=lambda residual: torch.empty_like(residual))
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of x + residual, rows [T, width]; `residual` becomes that sum.

    x may be in parts [parts, T, width] to be added.
    """
    return _norm(x, residual, weight, eps, has_residual=True)


@custom_op(
    "add_adapted_rms_norm", mutates_args=("residual",), result=lambda residual: torch.empty_like(residual)
)
def add_adapted_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, deltas: Tensor, slots: Tensor
) -> Tensor:
    """The same of x + deltas + residual for rows that have a slot; the kernels of both may have been beside
    each other, so it is a plain launch."""
    return _norm(x, residual, weight, eps, has_residual=True, deltas=(deltas, slots))


@custom_op("rms_norm", result=lambda x: torch.empty_like(x))
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows [T, width] at a mean square of one, times `weight`."""
    return _norm(x, x, weight, eps, has_residual=False)


@custom_op("scale_rows", result=lambda x: empty_scaled(x))
def scale_rows(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Dense rows [T, width] times `weight`, and float32 [width / 64, T]: the squares of 64 columns each."""
    scaled, squares = empty_scaled(x)
    num_rows, width = x.shape
    _scale_rows[(num_rows,)](
        x,
        weight,
        scaled,
        squares,
        num_rows,
        width=width,
        together=SQUARES_TOGETHER,
        block=next_power_of_2(width),
        num_warps=4,
        enable_fp_fusion=True,
        **dependent_launch.options(x.device),
    )
    return scaled, squares


@custom_op("silu_mul", mutates_args=("gate_up",))
def silu_mul(gate_up: Tensor) -> None:
    """silu(first half) * second half of dense rows [T, 2 * width], in the place of the first half."""
    num_tokens, width = gate_up.size(0), gate_up.size(1) // 2
    block = min(_GATE_BLOCK, next_power_of_2(width))
    _silu_mul[(num_tokens, cdiv(width, block))](
        gate_up,
        width=width,
        block=block,
        num_warps=4,
        enable_fp_fusion=True,
        **dependent_launch.options(gate_up.device),
    )
