"""Launches `cuda/fragments.cu`: a linear layer with its neighbours, for a small matrix and some tokens."""

import torch
from torch import Tensor

from ..cuda.compiled import CudaKernel, cuda_kernel
from ..lora.deltas import Shrunk
from .cuda_layer import launch_sliced, layer_constants
from .tiles import FragmentsTile, MatrixShape


def shared_bytes(tile: FragmentsTile, shape: MatrixShape, tokens: int, *, norm: bool) -> int:
    """As `sizeof(Shared)` there, for so many tokens."""
    rows = tile.rows * (2 if shape.gated else 1)
    steps = shape.in_features // tile.slices // tile.num_warps // 32
    staged = max(1, (rows // 8 - tile.held + norm) * steps) * tile.num_warps * 32
    padding = 4 if tokens == 8 else 8 if rows % 16 == 0 else 0
    parts = tile.num_warps * tokens * (rows + padding + 1)
    from_cluster = rows if tile.slices > 1 else 4
    return staged * 16 + (parts + tokens * from_cluster + tile.slices * tokens) * 4 + 16


def fragments_kernel(
    tile: FragmentsTile,
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
        "fragments.cu",
        "project",
        ROWS=tile.rows,
        SLICES=tile.slices,
        WARPS=tile.num_warps,
        HELD=tile.held,
        REGISTERS=tile.registers,
        TOKENS=tokens,
        SHARED_BYTES=shared_bytes(tile, shape, tokens, norm=norm),
        **layer_constants(shape, norm=norm, bias=bias, residual=residual, adapted=adapted, dtype=dtype),
    )


def launch_fragments(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out: Tensor,
    tile: FragmentsTile,
    shrunk: Shrunk | None = None,
) -> None:
    """Queue the kernel; see `launch_sliced`."""
    operands = (x, weight, bias, norm_weight, eps, residual, out, shrunk)
    launch_sliced(fragments_kernel, shared_bytes, tile, tile.num_warps, *operands)
