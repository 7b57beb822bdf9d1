"""Linear layers of any number of tokens, each by the kernel that is the choice for it."""

import torch
from torch import Tensor
from torch.nn import functional

from .. import lora
from ..lora import Adapted
from ..lora.deltas import Deltas, Operands
from ..rows import silu_mul
from .choice import choose
from .cpu_product import multiply, multiply_somehow
from .tiles import UNFUSED, Library, MatrixShape, PromptTile, SkinnyTile, Tile
from .weight import Weight, plain, tile_for

_MOST_TOKENS_BESIDE = 256
BESIDE_ADAPTERS = (Library, PromptTile)
"""Where adapters are to add to a product, a library makes it: while it runs, adapters begin beside it."""


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` of rows x [T, in]."""
    return joined(linear_in_parts(x, weight, bias), x.dtype)


def joined(product: Tensor, dtype: torch.dtype) -> Tensor:
    """What `linear_in_parts` returned, as one: rows [T, out] of `dtype`."""
    return product if product.dim() == 2 else product.sum(0).to(dtype)


def linear_in_parts(
    x: Tensor, weight: Weight, bias: Tensor | None = None, adapted: Adapted | None = None
) -> Tensor:
    """The same, adapters included, or float32 [parts, T, out] whose sum it is, for a reader that can add
    (`rows.add_rms_norm`, attention of single tokens).

    Several programs may share the columns of a matrix that has too few rows for all of them.
    """
    matrix, tile = plain(weight, "a product"), tile_for(x, weight, gated=False)
    if isinstance(tile, PromptTile) and adapted is None:
        return _of_prompt(x, matrix, bias, gated=False)
    is_library = isinstance(tile, BESIDE_ADAPTERS)
    if adapted is not None and (is_library or isinstance(tile, UNFUSED)):
        return _adapted(x, matrix, bias, adapted, by_library=is_library)
    product = _by_library(x, matrix, bias) if is_library else _by_kernel(tile, x, matrix, bias, gated=False)
    if adapted is not None:
        lora.add(x, product, *adapted)
    return product


def linear_beside_adapters(
    x: Tensor, weight: Weight, bias: Tensor | None, adapted: Adapted | None
) -> tuple[Tensor, Deltas | None]:
    """`linear_in_parts`, and what adapters are still to add to it, for a reader that can (`add_rms_norm`).

    Of prompts nothing is left: that would be a tensor more as large as the product, and twice.
    """
    if adapted is not None and adapted.rows.blocks is not None:
        matrix, tile = plain(weight, "a product"), tile_for(x, weight, gated=False)
        is_library = isinstance(tile, Library)
        if x.size(0) <= _MOST_TOKENS_BESIDE and (is_library or isinstance(tile, UNFUSED)):
            from .adapted_product import multiply_beside_adapters

            dense, adapters = x if is_library else x.contiguous(), Operands.of(adapted)
            product, deltas = multiply_beside_adapters(dense, matrix, bias, is_library, *adapters)
            return product, (deltas, adapters.slots)
    return linear_in_parts(x, weight, bias, adapted), None


def gated_linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, adapted: Adapted | None = None
) -> Tensor:
    """silu(first half) * second half of `x @ weight.T + bias`, adapters included; its rows may lie apart."""
    matrix, tile = plain(weight, "a gated product"), tile_for(x, weight, gated=True)
    if isinstance(tile, PromptTile) and adapted is None:
        return _of_prompt(x, matrix, bias, gated=True)
    if isinstance(tile, BESIDE_ADAPTERS):
        if adapted is None:
            return silu_mul(_by_library(x, matrix, bias))
        return silu_mul(_adapted(x, matrix, bias, adapted, by_library=True))
    return _by_kernel(tile, x, matrix, bias, gated=True, adapted=adapted)


def widens(
    shape: MatrixShape, num_tokens: int, dtype: torch.dtype, device: torch.device, *, adapted: bool
) -> bool:
    """Whether `gated_linear` makes gate and up, a tensor twice as wide as what it returns."""
    tile = choose(shape, num_tokens, dtype, device)
    return isinstance(tile, BESIDE_ADAPTERS if adapted else Library)


def adds_in_place(x: Tensor, weight: Weight, adapted: Adapted | None) -> bool:
    """Whether `add_linear` is the choice for a product that is added to rows."""
    return adapted is None and isinstance(tile_for(x, weight, gated=False), PromptTile)


def add_linear(rows: Tensor, x: Tensor, weight: Weight, bias: Tensor | None) -> None:
    """Add `x @ weight.T + bias`, rounded, to dense rows [T, out], where `adds_in_place`."""
    from .prompt_products import add_product

    add_product(x, plain(weight, "a product that is added to rows"), bias, rows)


def float_linear(x: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
    """`x @ weight.T` in float32, for logits; in dense `out` if that is given."""
    matrix = plain(weight, "a product in float32")
    if not x.is_cuda or x.dtype == torch.float32:
        product = functional.linear(x, matrix) if x.is_cuda else multiply_somehow(x, matrix).float()
        return product.contiguous() if out is None else out.copy_(product)
    if out is None:
        out = x.new_empty(x.size(0), matrix.size(0), dtype=torch.float32)
    tile = tile_for(x, weight, gated=False)
    if isinstance(tile, Library | PromptTile):  # of which results are never float32
        return torch.mm(x, matrix.t(), out_dtype=torch.float32, out=out)
    from . import triton_linear

    if isinstance(tile, SkinnyTile) and tile.parts > 1:
        return torch.sum(triton_linear.multiply(x, matrix, None, False, torch.float32), 0, out=out)
    triton_linear.multiply_into(x, matrix, out)
    return out


def _adapted(x: Tensor, matrix: Tensor, bias: Tensor | None, adapted: Adapted, *, by_library: bool) -> Tensor:
    if adapted.rows.blocks is None:
        product = _by_library(x, matrix, bias)
        lora.add(x, product, *adapted)
        return product
    from .adapted_product import multiply_adapted

    dense = x if by_library else x.contiguous()
    return multiply_adapted(dense, matrix, bias, by_library, *Operands.of(adapted))


def _of_prompt(x: Tensor, matrix: Tensor, bias: Tensor | None, *, gated: bool) -> Tensor:
    from .prompt_products import multiply_prompt

    return multiply_prompt(x, matrix, bias, gated)


def _by_library(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, matrix, bias) if x.is_cuda else multiply(x, matrix, bias)


def _by_kernel(
    tile: Tile,
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    *,
    gated: bool,
    adapted: Adapted | None = None,
) -> Tensor:
    from . import triton_linear

    x = x.contiguous()
    if adapted is not None:
        assert gated, "adapters add to a plain product when it is there"
        if isinstance(tile, UNFUSED):
            return triton_linear.multiply_and_gate_adapted(x, matrix, bias, *Operands.of(adapted))
        return triton_linear.project_few_adapted_tokens(
            x, matrix, bias, None, 0.0, True, None, x.dtype, *Operands.of(adapted)
        )
    if isinstance(tile, UNFUSED):
        return triton_linear.multiply(x, matrix, bias, gated, x.dtype)
    return triton_linear.project_few_tokens(x, matrix, bias, None, 0.0, gated, None, x.dtype)
