"""Work on rows one by one: norms and gates. On a CPU plain torch, on a GPU one kernel each."""

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Rows of x at a mean square of one, times `weight`; computed in float32 and rounded once."""
    if x.is_cuda and x.is_contiguous():
        from . import triton_rows

        return triton_rows.rms_norm(x, weight, eps)
    return functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, deltas: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of `residual + x`, and that sum; x may be in float32 parts [parts, T, width] to be added.

    `deltas`: float32 [T, width] for rows whose slot, int32 [T], is not negative, to be added as well.

    On a GPU the sum is in the memory of `residual`, which so stays one tensor through all layers of a step:
    new ones would be cut out of the block that the next gate and up needs whole.
    """
    if x.is_cuda:
        from . import triton_rows

        if deltas is not None:
            return triton_rows.add_adapted_rms_norm(x, residual, weight, eps, *deltas), residual
        return triton_rows.add_rms_norm(x, residual, weight, eps), residual
    assert deltas is None, "on a CPU adapters add to the product"
    total = residual + (x if x.dim() == residual.dim() else x.sum(0).to(residual.dtype))
    return functional.rms_norm(total, weight.shape, weight, eps), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of dense rows [T, 2 * width]; on a GPU in the memory of the first half.

    For long prompts these rows are the largest tensor of a step, and half as much again would be next.
    """
    if gate_up.is_cuda:
        from . import triton_rows

        triton_rows.silu_mul(gate_up)
        return gate_up.narrow(1, 0, gate_up.size(1) // 2)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
