"""Linear layers of any number of tokens: our kernels where they were measured to win, else cuBLAS."""

import torch
from torch import Tensor
from torch.nn import functional

from ..rows import silu_mul
from .cpu_product import multiply, multiply_somehow
from .tiles import MatrixShape, skinny_tile


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` of rows x [T, in]."""
    if x.is_cuda and _has_tile(x, weight, gated=False):
        from . import triton_linear

        return triton_linear.multiply_skinny(x, weight, bias, False, x.dtype)
    return _by_library(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(first half) * second half of `x @ weight.T + bias`."""
    if x.is_cuda and _has_tile(x, weight, gated=True):
        from . import triton_linear

        return triton_linear.multiply_skinny(x, weight, bias, True, x.dtype)
    return silu_mul(_by_library(x, weight, bias))


def float_linear(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """`x @ weight.T` in float32, for logits; in dense `out` if that is given."""
    if x.is_cuda and (_is_one_half_token(x) or _has_tile(x, weight, gated=False)):
        from . import triton_linear

        if out is None:
            out = x.new_empty(x.size(0), weight.size(0), dtype=torch.float32)
        triton_linear.multiply_into(x, weight, out)
        return out
    product = functional.linear(x, weight) if x.is_cuda else multiply_somehow(x, weight)
    return product.float().contiguous() if out is None else out.copy_(product)


def _by_library(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return functional.linear(x, weight, bias) if x.is_cuda else multiply(x, weight, bias)


def _is_one_half_token(x: Tensor) -> bool:
    return x.size(0) == 1 and x.dtype in (torch.bfloat16, torch.float16)


def _has_tile(x: Tensor, weight: Tensor, *, gated: bool) -> bool:
    shape = MatrixShape(weight.size(0) // (2 if gated else 1), weight.size(1), gated)
    return x.dtype == torch.bfloat16 and skinny_tile(shape, x.size(0)) is not None
