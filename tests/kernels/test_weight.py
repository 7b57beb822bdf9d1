"""A weight in a format that a kernel does not take is refused by name, never taken for a plain one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ostinato.kernels.linear import few_tokens, products, scaled_rows
from ostinato.kernels.linear.weight import Weight, tile_for
from ostinato.kernels.registry import FormatError

X = torch.ones(3, 64)
SCALED = scaled_rows.scale(X, torch.ones(64))
TAKERS: dict[str, Callable[[Weight], Any]] = {
    "a product": lambda weight: products.linear(X, weight),
    "a gated product": lambda weight: products.gated_linear(X, weight),
    "a product in float32": lambda weight: products.float_linear(X, weight),
    "a product with its neighbours": lambda weight: few_tokens.project(X, weight, residual=X),
    "a product of scaled rows": lambda weight: scaled_rows.project(SCALED, weight, None, 1e-6, gated=False),
    "a product that is added to rows": lambda weight: scaled_rows.add_projected(
        SCALED, X, weight, None, torch.ones(64)
    ),
    "the kernel table": lambda weight: tile_for(X, weight, gated=False),
}


@pytest.mark.parametrize("taker", TAKERS)
def test_an_unknown_format_is_refused_by_name(taker: str) -> None:
    matrix = torch.ones(64, 64)
    assert TAKERS[taker](Weight(matrix)) is not None
    with pytest.raises(FormatError, match=f"^{taker} cannot take a weight of format 'fp8'"):
        TAKERS[taker](Weight(matrix, torch.ones(1), format="fp8"))
