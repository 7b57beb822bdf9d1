"""Work on rows one by one: norms, gates, the best entry. On a CPU plain torch, on a GPU one kernel each."""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows of x at a mean square of one, times `weight`; computed in float32 and rounded once."""
    if x.is_cuda and x.is_contiguous():
        from . import triton_rows

        return triton_rows.rms_norm(x, weight, eps)
    return functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of `residual + x`, and that sum; x may be in float32 parts [parts, T, width] to be added."""
    if x.is_cuda:
        from . import triton_rows

        return triton_rows.add_rms_norm(x, residual, weight, eps)
    total = residual + (x if x.dim() == residual.dim() else x.sum(0).to(residual.dtype))
    return functional.rms_norm(total, weight.shape, weight, eps), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of rows [T, 2 * width]."""
    if gate_up.is_cuda:
        from . import triton_rows

        return triton_rows.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def argmax(x: Tensor) -> Tensor:
    """int64 [n]: the index of the largest entry of each row of x [n, width], the first among equal ones."""
    if x.is_cuda:
        from . import triton_rows

        return triton_rows.argmax_rows(x)
    return torch.argmax(x, dim=-1)
