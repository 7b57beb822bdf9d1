"""Linear layers with a norm between them that no kernel does by itself, for dozens or hundreds of tokens.

A norm multiplies a row by a weight for every column and by one factor, which follows from the row's squares.
The layer before it adds to the rows anyway: it leaves the sums, the sums times the weight, and what their
squares add up to. The layer behind it multiplies these scaled rows and applies the factor to its results.

This is the form of a step where `wide` is the choice for all matrices of a layer.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .. import lora
from ..lora import Adapted
from ..lora.low_rank import Operands
from ..norms import SQUARES_TOGETHER
from .choice import choose
from .tiles import MatrixShape, WideTile
from .weight import Weight, plain


class ScaledRows(NamedTuple):
    """Rows on their way through the layers, and what the next layer needs of their norm."""

    rows: Tensor
    """[T, H]."""
    scaled: Tensor
    """The same times the norm's weight."""
    squares: Tensor
    """float32 [H / 64, T]: of the rows, over 64 columns each."""


def are_the_choice(
    shapes: Iterable[MatrixShape], num_tokens: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Tells whether layers of these matrices should run with deferred norms."""
    return device.type == "cuda" and all(
        isinstance(choose(shape, num_tokens, dtype, device), WideTile) for shape in shapes
    )


def scale(rows: Tensor, norm_weight: Tensor) -> ScaledRows:
    """Prepares rows [T, H] for the first layer, which no layer has scaled."""
    if rows.is_cuda:
        from ..norms.triton_rows import scale_rows

        return ScaledRows(rows, *scale_rows(rows, norm_weight))
    return _scaled(rows, norm_weight)


def project(
    x: ScaledRows,
    weight: Weight,
    bias: Tensor | None,
    eps: float,
    *,
    gated: bool,
    adapted: Adapted | None = None,
) -> Tensor:
    """`norm(rows) @ weight.T + bias`, adapters included, gated if asked."""
    matrix = plain(weight, "a product of scaled rows")
    if x.rows.is_cuda:
        from .ops import project_scaled, project_scaled_adapted

        if adapted is None:
            return project_scaled(x.scaled, x.squares, matrix, bias, eps, gated)
        adapters = Operands.of(adapted)
        return project_scaled_adapted(x.scaled, x.squares, matrix, bias, eps, gated, adapters)
    factor = (x.squares.sum(0) / x.rows.size(1) + eps).rsqrt()
    y = functional.linear(x.scaled, matrix)
    if adapted is not None:
        lora.add(x.scaled, y, *adapted)
    y = y.float() * factor[:, None]
    y = y if bias is None else y + bias
    if gated:
        first, second = y.chunk(2, dim=-1)
        y = functional.silu(first) * second
    return y.to(x.rows.dtype)


def add_projected(
    to: ScaledRows,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    norm_weight: Tensor,
    adapted: Adapted | None = None,
) -> ScaledRows:
    """`rows + x @ weight.T + bias`, adapters included, and what the next layer needs of its norm; on a GPU in
    the same memory."""
    matrix = plain(weight, "a product that is added to rows")
    if x.is_cuda:
        from .ops import add_projected as add
        from .ops import add_projected_adapted as add_adapted

        if adapted is None:
            return ScaledRows(to.rows, *add(x, matrix, bias, to.rows, norm_weight))
        adapters = Operands.of(adapted)
        return ScaledRows(to.rows, *add_adapted(x, matrix, bias, to.rows, norm_weight, adapters))
    product = functional.linear(x, matrix, bias)
    if adapted is not None:
        lora.add(x, product, *adapted)
    return _scaled(to.rows + product, norm_weight)


def _scaled(rows: Tensor, norm_weight: Tensor) -> ScaledRows:
    squares = rows.float().square().unflatten(1, (-1, SQUARES_TOGETHER)).sum(2).t().contiguous()
    return ScaledRows(rows, rows * norm_weight, squares)
