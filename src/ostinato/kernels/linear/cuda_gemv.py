"""Launches `cuda/gemv.cu`: a linear layer with its neighbours, for one token."""

import torch
from torch import Tensor

from ..cuda.compiled import CudaKernel, cuda_kernel
from ..lora.deltas import Deltas
from ..on_chip_memory import MOSTLY_L1
from .cuda_layer import layer_constants, layer_shape, layer_tensors
from .tiles import CudaGemvTile, MatrixShape


def gemv_kernel(
    tile: CudaGemvTile,
    shape: MatrixShape,
    *,
    norm: bool,
    bias: bool = False,
    residual: bool = False,
    adapted: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> CudaKernel:
    """The kernel; results in `dtype`."""
    assert tile.fits(shape), (shape, tile)
    return cuda_kernel(
        "gemv.cu",
        "project",
        ROWS=tile.rows,
        WARPS=tile.num_warps,
        REGISTERS=tile.registers,
        **layer_constants(shape, norm=norm, bias=bias, residual=residual, adapted=adapted, dtype=dtype),
    )


def launch_gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out: Tensor,
    tile: CudaGemvTile,
    deltas: Deltas | None = None,
) -> None:
    """Queue the kernel; all operands dense and bfloat16, `out` that or float32, of one token."""
    assert x.size(0) == 1, "one token"
    shape = layer_shape(x, weight, out)
    kernel = gemv_kernel(
        tile,
        shape,
        norm=norm_weight is not None,
        bias=bias is not None,
        residual=residual is not None,
        adapted=deltas is not None,
        dtype=out.dtype,
    )
    kernel.launch(
        grid=(shape.out_features // (tile.rows * tile.num_warps), 1, 1),
        block=tile.num_warps * 32,
        args=(
            *layer_tensors(x, weight, bias, norm_weight, residual, out),
            *(deltas or (x, x)),
            shape.out_features,
            float(eps),
        ),
        shared_share=MOSTLY_L1,
    )
