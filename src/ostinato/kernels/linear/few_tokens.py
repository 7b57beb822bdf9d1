"""A linear layer with its neighbours, for steps of few tokens: norm before, gate, residual after.

For so few tokens reading the weights is all that takes time, and libraries made for large products reach a
quarter of the memory's speed. `most_tokens` says how far fused kernels are the choice; beyond, norm, product
and sum are steps of their own.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional

from .choice import choose
from .tiles import FUSED, MOST_TOKENS, MatrixShape, shape_of


def most_tokens(shapes: Iterable[MatrixShape], dtype: torch.dtype, device: torch.device) -> int:
    """Up to how many tokens all these matrices have fused kernels on `device`."""
    if device.type != "cuda":
        return 0
    limit = max(MOST_TOKENS[kind] for kind in FUSED)
    shapes = list(shapes)
    return next(
        (
            num_tokens - 1
            for num_tokens in range(1, limit + 1)
            if not all(isinstance(choose(shape, num_tokens, dtype, device), FUSED) for shape in shapes)
        ),
        limit,
    )


def project(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`residual + gate(norm(x) @ weight.T + bias)`, each part where it is asked for, in `dtype` (that of x).

    `gated`: silu(first half) * second half of the product. Sums are float32 and rounded once.
    """
    if x.is_cuda and isinstance(choose(shape_of(weight, gated), x.size(0), x.dtype, x.device), FUSED):
        from . import triton_linear

        return triton_linear.project_few_tokens(
            x, weight, bias, norm_weight, eps, gated, residual, dtype or x.dtype
        )
    return reference(
        x, weight, bias, norm_weight=norm_weight, eps=eps, gated=gated, residual=residual, dtype=dtype
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
) -> Tensor:
    """`project` in plain torch, in the precision of its inputs."""
    y = x if norm_weight is None else functional.rms_norm(x, norm_weight.shape, norm_weight, eps)
    y = functional.linear(y, weight, bias)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = functional.silu(gate) * up
    if residual is not None:
        y = residual + y
    return y.to(dtype or x.dtype)
