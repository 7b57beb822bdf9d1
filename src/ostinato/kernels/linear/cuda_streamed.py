"""Launches `cuda/streamed.cu`: a linear layer with its neighbours, for a large matrix and some tokens."""

import torch
from torch import Tensor

from ..cuda.compiled import CudaKernel, cuda_kernel
from ..lora.deltas import Shrunk
from .cuda_layer import launch_sliced, layer_constants, layer_shape
from .tiles import MatrixShape, StreamedTile


def shared_bytes(tile: StreamedTile, shape: MatrixShape, tokens: int, *, norm: bool) -> int:
    """As `sizeof(Shared)` there, for so many tokens."""
    warps, halves = tile.num_warps(shape), 2 if shape.gated else 1
    weights = tile.ahead * 2 * warps * 32 * 16
    parts = tile.shares * tokens * (warps // tile.shares * 16 + 4) * 4
    norm_weight = (shape.in_features // tile.slices if norm else 8) * 2
    chunks = tile.slots * tile.shares * tokens * (tile.chunk + 32) * 2
    from_cluster = tokens * (halves * tile.rows if tile.slices > 1 else 4) * 4
    sums = (warps * 32 + tokens * (tile.slices + 1)) * 4
    return max(weights, -(-parts // 16) * 16) + norm_weight + chunks + from_cluster + sums + 16


def streamed_kernel(
    tile: StreamedTile,
    shape: MatrixShape,
    tokens: int,
    *,
    norm: bool,
    bias: bool = False,
    residual: bool = False,
    adapted: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> CudaKernel:
    """The kernel for up to so many tokens; results in `dtype`."""
    assert tile.fits(shape), (shape, tile)
    return cuda_kernel(
        "streamed.cu",
        "project",
        ROWS=tile.rows,
        SLICES=tile.slices,
        SHARES=tile.shares,
        CHUNK=tile.chunk,
        SLOTS=tile.slots,
        AHEAD=tile.ahead,
        REGISTERS=tile.registers,
        TOKENS=tokens,
        SHARED_BYTES=shared_bytes(tile, shape, tokens, norm=norm),
        **layer_constants(shape, norm=norm, bias=bias, residual=residual, adapted=adapted, dtype=dtype),
    )


def launch_streamed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out: Tensor,
    tile: StreamedTile,
    shrunk: Shrunk | None = None,
) -> None:
    """Queue the kernel; see `launch_sliced`."""
    operands = (x, weight, bias, norm_weight, eps, residual, out, shrunk)
    num_warps = tile.num_warps(layer_shape(x, weight, out))
    launch_sliced(streamed_kernel, shared_bytes, tile, num_warps, *operands)
