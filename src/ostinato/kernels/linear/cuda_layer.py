"""What `cuda/gemv.cu` and `cuda/fragments.cu` have in common: a linear layer with its neighbours."""

import torch
from torch import Tensor

from .tiles import MatrixShape


def layer_constants(
    shape: MatrixShape, *, norm: bool, bias: bool, residual: bool, dtype: torch.dtype
) -> dict[str, int]:
    """What a layer is compiled for beside its tile; results in `dtype`."""
    return {
        "IN": shape.in_features,
        "GATED": shape.gated,
        "NORM": norm,
        "BIAS": bias,
        "RESIDUAL": residual,
        "OUT_FLOAT": dtype == torch.float32,
    }


def layer_shape(x: Tensor, weight: Tensor, out: Tensor) -> MatrixShape:
    """Of a weight, gated if it has twice as many rows as there are results."""
    return MatrixShape(out.size(1), x.size(1), weight.size(0) == 2 * out.size(1))


def layer_tensors(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> tuple[Tensor, ...]:
    """In the order of the kernels' parameters; x in place of what there is not."""
    norm = x if norm_weight is None else norm_weight
    assert not (x.data_ptr() | weight.data_ptr() | norm.data_ptr()) % 16, "16 bytes are loaded at a time"
    return (weight, norm, x if bias is None else bias, x, x if residual is None else residual, out)
