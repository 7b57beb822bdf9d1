"""Launches `cuda/wide.cu`: a linear layer for dozens of tokens."""

import torch
from torch import Tensor

from ..cuda.compiled import CudaKernel, TileMap, cuda_kernel
from ..host_sizes import cdiv
from ..lora.low_rank import Shrunk
from .cuda_few_tokens import low_rank_operands
from .tiles import MatrixShape, WideTile

_COLUMNS = 64
"""Of a box."""


def wide_kernel(
    tile: WideTile,
    shape: MatrixShape,
    *,
    bias: bool = False,
    scaled: bool = False,
    added: bool = False,
    adapted: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> CudaKernel:
    """Returns the kernel; results in `dtype`."""
    assert tile.fits(shape), (shape, tile)
    return cuda_kernel(
        "wide.cu",
        "multiply",
        IN=shape.in_features,
        GATED=shape.gated,
        BIAS=bias,
        SCALED=scaled,
        ADDED=added,
        ADAPTED=adapted,
        OUT_FLOAT=dtype == torch.float32,
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        WEIGHT_SLOTS=tile.weight_slots,
        TOKEN_SLOTS=tile.token_slots,
        SLICES=tile.slices,
        SHARED_BYTES=tile.shared_bytes(shape, norm=scaled),
    )


def launch_wide(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: WideTile,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    norm_weight: Tensor | None = None,
    scaled: Tensor | None = None,
    new_squares: Tensor | None = None,
    shrunk: Shrunk | None = None,
) -> None:
    """Queue the kernel; all operands bfloat16, `out` that or float32. Rows of x may lie apart.

    `squares`: x are rows times a norm's weight, whose factor follows from the rows' squares. `norm_weight`:
    results are added to `out`; the sums times this weight become `scaled`, their squares `new_squares`.
    `shrunk`: what adapters are to add to the product.
    """
    shape, num_tokens = MatrixShape(out.size(1), x.size(1), weight.size(0) == 2 * out.size(1)), x.size(0)
    is_scaled, is_added = squares is not None, norm_weight is not None
    kernel = wide_kernel(
        tile,
        shape,
        bias=bias is not None,
        scaled=is_scaled,
        added=is_added,
        adapted=shrunk is not None,
        dtype=out.dtype,
    )
    assert shrunk is None or not (shrunk.of.second | shrunk.of.third) % 16, "a warp has rows of one part"
    kernel.launch(
        grid=(shape.out_features // tile.rows * tile.slices, cdiv(num_tokens, tile.tokens), 1),
        block=tile.num_threads(shape),
        args=(
            TileMap(weight, (tile.rows, _COLUMNS)),
            TileMap(x, (tile.tokens, _COLUMNS)),
            *(x if tensor is None else tensor for tensor in (bias, squares, norm_weight)),
            out,
            *(out if tensor is None else tensor for tensor in (scaled, new_squares)),
            *(() if shrunk is None else low_rank_operands(shrunk)),
            num_tokens,
            shape.out_features,
            float(eps),
        ),
        shared_bytes=tile.shared_bytes(shape, norm=is_scaled),
        cluster=tile.slices,
    )
