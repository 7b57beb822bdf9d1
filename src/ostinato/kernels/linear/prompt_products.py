"""Products of thousands of tokens as custom ops, by `cuda_prompt`."""

from torch import Tensor

from ..custom_op import custom_op
from .cuda_prompt import launch_prompt


@custom_op("multiply_prompt")
def multiply_prompt(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """`x @ weight.T + bias`, or silu(first half) * second half of it, of rows x [T, in]."""
    out = _results(x, weight, gated)
    launch_prompt(x, weight, bias, out)
    return out


@multiply_prompt.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    return _results(x, weight, gated)


@custom_op("add_product", mutates_args=("rows",))
def add_product(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor) -> None:
    """Add `x @ weight.T + bias`, rounded, to dense rows [T, out]."""
    launch_prompt(x, weight, bias, rows, added=True)


@add_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor) -> None:
    return None


def _results(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    return x.new_empty(x.size(0), weight.size(0) // (2 if gated else 1))
