"""A linear layer with its neighbours, for steps of few tokens: norm before, gate, residual after.

For so few tokens reading the weights is all that takes time, and libraries made for large products reach a
quarter of the memory's speed. This is the form of a step where fused kernels are the choice for all matrices
of a layer; elsewhere norm, product and sum are steps of their own.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from .. import lora
from ..lora import Adapted
from ..lora.low_rank import Operands
from .choice import choose
from .tiles import FUSED, MatrixShape
from .weight import Weight, plain, tile_for


def are_the_choice(
    shapes: Iterable[MatrixShape], num_tokens: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Tells whether layers of these matrices should run fused."""
    return device.type == "cuda" and all(
        isinstance(choose(shape, num_tokens, dtype, device), FUSED) for shape in shapes
    )


def project(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    adapted: Adapted | None = None,
) -> Tensor:
    """`residual + gate(norm(x) @ weight.T + bias)`, each part where it is asked for, in `dtype` (that of x).

    `gated`: silu(first half) * second half of the product; `adapted`: adapters add to it before that.
    Sums are float32 and rounded once.
    """
    matrix = plain(weight, "a product with its neighbours")
    if isinstance(tile_for(x, weight, gated=gated), FUSED):
        from . import ops
        from .cuda_few_tokens import FusedLayer

        layer = FusedLayer(x, matrix, bias, norm_weight, eps, gated, residual, dtype or x.dtype)
        if adapted is None:
            return ops.project_few_tokens(layer)
        return ops.project_few_adapted_tokens(layer, Operands.of(adapted))
    return reference(
        x,
        matrix,
        bias,
        norm_weight=norm_weight,
        eps=eps,
        gated=gated,
        residual=residual,
        dtype=dtype,
        adapted=adapted,
    )


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    adapted: Adapted | None = None,
) -> Tensor:
    """`project` of a plain matrix in plain torch, in the precision of its inputs."""
    y = x if norm_weight is None else functional.rms_norm(x, norm_weight.shape, norm_weight, eps)
    normed, y = y, functional.linear(y, weight, bias)
    if adapted is not None:
        lora.add(normed, y, *adapted)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = functional.silu(gate) * up
    if residual is not None:
        y = residual + y
    return y.to(dtype or x.dtype)
