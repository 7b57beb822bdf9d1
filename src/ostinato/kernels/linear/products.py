"""Linear layers of any number of tokens: dispatches to the kernel of the tile, on a CPU to torch."""

import platform

import torch
from torch import Tensor
from torch.nn import functional

from .. import lora
from ..lora import Adapted
from ..lora.low_rank import Deltas, Operands
from ..norms.rows import silu_mul
from .choice import choose
from .tiles import UNFUSED, Library, MatrixShape, PromptTile, SkinnyTile, Tile
from .weight import Weight, plain, tile_for

_MOST_TOKENS_BESIDE = 256
BESIDE_ADAPTERS = (Library, PromptTile)
"""Where adapters are to add to a product, a library makes it: while it runs, adapters begin beside it."""


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` of rows x [T, in]."""
    return joined(linear_in_parts(x, weight, bias), x.dtype)


def joined(product: Tensor, dtype: torch.dtype) -> Tensor:
    """Adds up split-K partials of `linear_in_parts`: rows [T, out] of `dtype`."""
    return product if product.dim() == 2 else product.sum(0).to(dtype)


def linear_in_parts(
    x: Tensor, weight: Weight, bias: Tensor | None = None, adapted: Adapted | None = None
) -> Tensor:
    """The same, adapters included, or float32 [parts, T, out] whose sum it is, for a reader that can add
    (`rows.add_rms_norm`, attention of single tokens).

    Several CTAs may share the columns of a matrix that has too few rows for all of them.
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
            from .ops import multiply_beside_adapters

            dense, adapters = x if is_library else x.contiguous(), Operands.of(adapted)
            product, deltas = multiply_beside_adapters(dense, matrix, bias, is_library, adapters)
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
    """Tells whether `gated_linear` makes gate and up, a tensor twice as wide as what it returns."""
    tile = choose(shape, num_tokens, dtype, device)
    return isinstance(tile, BESIDE_ADAPTERS if adapted else Library)


def adds_in_place(x: Tensor, weight: Weight, adapted: Adapted | None) -> bool:
    """Tells whether `add_linear` is the choice for a product that is added to rows."""
    return adapted is None and isinstance(tile_for(x, weight, gated=False), PromptTile)


def add_linear(rows: Tensor, x: Tensor, weight: Weight, bias: Tensor | None) -> None:
    """Add `x @ weight.T + bias`, rounded, to dense rows [T, out], where `adds_in_place`."""
    from .ops import add_product

    add_product(x, plain(weight, "a product that is added to rows"), bias, rows)


def float_linear(x: Tensor, weight: Weight, out: Tensor | None = None) -> Tensor:
    """`x @ weight.T` in float32, for logits; in dense `out` if that is given."""
    matrix = plain(weight, "a product in float32")
    if not x.is_cuda or x.dtype == torch.float32:
        product = functional.linear(x, matrix) if x.is_cuda else _on_cpu_any_layout(x, matrix).float()
        return product.contiguous() if out is None else out.copy_(product)
    if out is None:
        out = x.new_empty(x.size(0), matrix.size(0), dtype=torch.float32)
    tile = tile_for(x, weight, gated=False)
    if isinstance(tile, Library | PromptTile):  # of which results are never float32
        return torch.mm(x, matrix.t(), out_dtype=torch.float32, out=out)
    from . import ops

    if isinstance(tile, SkinnyTile) and tile.parts > 1:
        return torch.sum(ops.multiply(x, matrix, None, False, torch.float32), 0, out=out)
    ops.multiply_into(x, matrix, out)
    return out


def _adapted(x: Tensor, matrix: Tensor, bias: Tensor | None, adapted: Adapted, *, by_library: bool) -> Tensor:
    if adapted.rows.blocks is None:
        product = _by_library(x, matrix, bias)
        lora.add(x, product, *adapted)
        return product
    from .ops import multiply_adapted

    dense = x if by_library else x.contiguous()
    return multiply_adapted(dense, matrix, bias, by_library, Operands.of(adapted))


def _of_prompt(x: Tensor, matrix: Tensor, bias: Tensor | None, *, gated: bool) -> Tensor:
    from .ops import multiply_prompt

    return multiply_prompt(x, matrix, bias, gated)


def _by_library(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, matrix, bias) if x.is_cuda else _on_cpu(x, matrix, bias)


def _by_kernel(
    tile: Tile,
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    *,
    gated: bool,
    adapted: Adapted | None = None,
) -> Tensor:
    from . import ops
    from .cuda_few_tokens import FusedLayer

    x = x.contiguous()
    layer = FusedLayer(x, matrix, bias, None, 0.0, gated, None, x.dtype)
    if adapted is not None:
        assert gated, "LoRA is added to a plain product afterwards"
        if isinstance(tile, UNFUSED):
            return ops.multiply_and_gate_adapted(x, matrix, bias, Operands.of(adapted))
        return ops.project_few_adapted_tokens(layer, Operands.of(adapted))
    if isinstance(tile, UNFUSED):
        return ops.multiply(x, matrix, bias, gated, x.dtype)
    return ops.project_few_tokens(layer)


# On aarch64 `x @ weight.T` of a few rows is slower than `(weight @ x.T).T`: for 16 rows the four products of
# a layer of SmolLM2-135M take 3.2 ms one way and 2.3 ms the other (torch 2.13, Neoverse N1, float32, two
# threads). From 64 rows on nothing is gained, nor below 8; other machines were not measured.
_ON_ARM = platform.machine() in ("aarch64", "arm64")
_TURNED_ROWS = range(8, 64)


def _is_better_turned(x: Tensor) -> bool:
    return _ON_ARM and x.dtype == torch.float32 and x.size(0) in _TURNED_ROWS


def _on_cpu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `x @ weight.T + bias` of rows x [T, in]."""
    if not _is_better_turned(x):
        return functional.linear(x, weight, bias)
    product = torch.mm(weight, x.t()).t().contiguous()
    return product if bias is None else product + bias


def _on_cpu_any_layout(x: Tensor, weight: Tensor) -> Tensor:
    """Returns `x @ weight.T`; its columns may be what is contiguous."""
    return torch.mm(weight, x.t()).t() if _is_better_turned(x) else functional.linear(x, weight)
