# mypy: allow-untyped-defs
# (Triton gives a meaning of its own to the annotations of a kernel's parameters.)
"""Kernels that work on rows one by one: residual add + norm, gate, the best entry. See `rows`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import dependent_launch
from .custom_op import custom_op
from .dependent_launch import wait_for_previous

_GATE_BLOCK = 1024
_BEST_BLOCK = 4096


@triton.jit(do_not_specialize=("num_rows",))
def _add_rms_norm(
    x,
    residual,
    weight,
    normed,
    total,
    eps,
    num_rows,
    width: tl.constexpr,
    block: tl.constexpr,
    parts: tl.constexpr,
    has_residual: tl.constexpr,
    dependent: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    k = tl.arange(0, block)
    inside = k < width
    scale = tl.load(weight + k, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(dependent)
    v = tl.load(x + row + k, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, parts):
        v += tl.load(x + part * num_rows * width + row + k, mask=inside, other=0.0).to(tl.float32)
    if has_residual:
        v += tl.load(residual + row + k, mask=inside, other=0.0).to(tl.float32)
        stored = v.to(total.dtype.element_ty)
        tl.store(total + row + k, stored, inside)
        v = stored.to(tl.float32)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / width + eps) * scale
    tl.store(normed + row + k, v.to(normed.dtype.element_ty), inside)


@triton.jit
def _silu_mul(gate_up, out, width: tl.constexpr, block: tl.constexpr, dependent: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * block + tl.arange(0, block)
    inside = k < width
    wait_for_previous(dependent)
    gate = tl.load(gate_up + row * (2 * width) + k, mask=inside, other=0.0)
    up = tl.load(gate_up + row * (2 * width) + width + k, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded in between, as two steps of their own would.
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + k, (silu * up.to(tl.float32)).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=("num_blocks",))
def _best_of_block(
    x,
    best,
    best_at,
    row_stride,
    num_blocks,
    width: tl.constexpr,
    block: tl.constexpr,
    dependent: tl.constexpr,
):
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    k = part * block + tl.arange(0, block)
    wait_for_previous(dependent)
    v = tl.load(x + row * row_stride + k, mask=k < width, other=float("-inf")).to(tl.float32)
    value, at = tl.max(v, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * num_blocks + part, value)
    tl.store(best_at + row * num_blocks + part, part * block + at)


@triton.jit(do_not_specialize=("num_blocks",))
def _best_of_row(
    best, best_at, out, num_blocks, width: tl.constexpr, block: tl.constexpr, dependent: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, block)
    wait_for_previous(dependent)
    inside = k < num_blocks
    v = tl.load(best + row * num_blocks + k, mask=inside, other=float("-inf"))
    value = tl.max(v, 0)
    at = tl.load(best_at + row * num_blocks + k, mask=inside & (v == value), other=width)
    # Of equal ones the first; a row of nothing but NaN has none, and its index must still be a legal one.
    at = tl.min(at, 0)
    tl.store(out + row, tl.where((at < 0) | (at >= width), 0, at).to(tl.int64))


@custom_op("add_rms_norm")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(normed, x + residual) of rows [T, width]; x may be in parts [parts, T, width] to be added."""
    normed, total = torch.empty_like(residual), torch.empty_like(residual)
    width = x.size(-1)
    num_rows = residual.numel() // width
    block = triton.next_power_of_2(width)
    _add_rms_norm[(num_rows,)](
        x,
        residual,
        weight,
        normed,
        total,
        eps,
        num_rows,
        width=width,
        block=block,
        parts=x.size(0) if x.dim() > residual.dim() else 1,
        has_residual=True,
        num_warps=8 if block >= 4096 else 4,
        **dependent_launch.options(x.device),
    )
    return normed, total


@add_rms_norm.register_fake
def _(x, residual, weight, eps):
    return torch.empty_like(residual), torch.empty_like(residual)


@custom_op("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows [T, width] at a mean square of one, times `weight`."""
    normed = torch.empty_like(x)
    width = x.size(-1)
    block = triton.next_power_of_2(width)
    num_rows = x.numel() // width
    _add_rms_norm[(num_rows,)](
        x,
        x,
        weight,
        normed,
        normed,
        eps,
        num_rows,
        width=width,
        block=block,
        parts=1,
        has_residual=False,
        num_warps=8 if block >= 4096 else 4,
        **dependent_launch.options(x.device),
    )
    return normed


@rms_norm.register_fake
def _(x, weight, eps):
    return torch.empty_like(x)


@custom_op("silu_mul")
def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of rows [T, 2 * width]."""
    num_tokens, width = gate_up.size(0), gate_up.size(1) // 2
    out = torch.empty(num_tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    block = min(_GATE_BLOCK, triton.next_power_of_2(width))
    _silu_mul[(num_tokens, triton.cdiv(width, block))](
        gate_up, out, width=width, block=block, num_warps=4, **dependent_launch.options(out.device)
    )
    return out


@silu_mul.register_fake
def _(gate_up):
    return gate_up.new_empty(gate_up.size(0), gate_up.size(1) // 2)


@custom_op("argmax_rows")
def argmax_rows(x: Tensor) -> Tensor:
    """int64 [n]: the index of the largest entry of each row, the first among equal ones."""
    num_rows, width = x.shape
    block = min(_BEST_BLOCK, triton.next_power_of_2(width))
    num_blocks = triton.cdiv(width, block)
    best = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=x.device)
    best_at = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=x.device)
    _best_of_block[(num_blocks, num_rows)](
        x,
        best,
        best_at,
        x.stride(0),
        num_blocks,
        width=width,
        block=block,
        num_warps=8,
        **dependent_launch.options(x.device),
    )
    return join_best(best, best_at, width)


@argmax_rows.register_fake
def _(x):
    return torch.empty(x.size(0), dtype=torch.int64, device=x.device)


def join_best(best: Tensor, best_at: Tensor, width: int) -> Tensor:
    """int64 [n], below `width`: what `best_at` [n, blocks] has beside each row's largest value in `best`."""
    num_rows, num_blocks = best.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=best.device)
    _best_of_row[(num_rows,)](
        best,
        best_at,
        out,
        num_blocks,
        width=width,
        block=max(16, triton.next_power_of_2(num_blocks)),
        num_warps=4,
        **dependent_launch.options(best.device),
    )
    return out
