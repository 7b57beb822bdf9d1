"""The custom ops of linear layers. Each looks up its tile by shape and queues the kernel of that tile.

| op | does | kernels |
|---|---|---|
| `project_few_tokens` | norm, product, gate, residual in one | `gemv`, `cuda_gemv`, `fragments`, `streamed` |
| `multiply`, `multiply_into` | the product, gated if asked | `skinny`, `wide` |
| `multiply_prompt`, `add_product` | the same for thousands of tokens | `prompt` |
| `project_scaled`, `add_projected` | behind and before a deferred norm | `wide` |
| `..._adapted`, `multiply_beside_adapters` | the same with LoRA | the same, `lora` |
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .. import side_stream
from ..custom_op import custom_op
from ..lora.low_rank import Operands, Shrunk
from ..norms import empty_scaled
from .choice import choose_for
from .cuda_few_tokens import FusedLayer, launch_few_tokens, launch_gemv
from .cuda_prompt import launch_prompt
from .cuda_wide import launch_wide
from .tiles import (
    UNFUSED,
    CudaGemvTile,
    FragmentsTile,
    GemvTile,
    SkinnyTile,
    StreamedTile,
    Tile,
    WideTile,
)
from .triton_gemv import launch_triton_gemv
from .triton_skinny import launch_skinny


@custom_op("project_few_tokens", result=lambda layer: layer.empty_result())
def project_few_tokens(layer: FusedLayer) -> Tensor:
    """See `few_tokens.project`; the tile is one of a fused kernel."""
    out = layer.empty_result()
    _launch_fused(layer, out)
    return out


@custom_op("project_few_adapted_tokens", result=lambda layer: layer.empty_result())
def project_few_adapted_tokens(layer: FusedLayer, adapters: Operands) -> Tensor:
    """`project_few_tokens` with LoRA."""
    out = layer.empty_result()
    _launch_fused(layer, out, adapters)
    return out


def _launch_fused(layer: FusedLayer, out: Tensor, adapters: Operands | None = None) -> None:
    tile = _tile(layer.x, layer.weight, gated=layer.gated)
    match tile:
        case FragmentsTile() | StreamedTile():
            launch_few_tokens(layer, out, tile, adapters and adapters.shrunk(layer.x, layer.norm_weight))
        case CudaGemvTile():
            launch_gemv(layer, out, tile, adapters and adapters.deltas(layer.x, layer.norm_weight))
        case GemvTile():
            launch_triton_gemv(layer, out, tile, adapters and adapters.deltas(layer.x, layer.norm_weight))
        case _:
            raise AssertionError(f"{tile} is not fused")


def _empty_product(x: Tensor, weight: Tensor, gated: bool, dtype: torch.dtype) -> Tensor:
    """Allocates what `multiply` returns: split-K partials if the tile has parts."""
    tile, out_features = _unfused_tile(x, weight, gated), weight.size(0) // (2 if gated else 1)
    if isinstance(tile, SkinnyTile) and tile.parts > 1:
        return x.new_empty(tile.parts, x.size(0), out_features, dtype=torch.float32)
    return x.new_empty(x.size(0), out_features, dtype=dtype)


@custom_op("multiply_and_gate_adapted", result=lambda x, weight: _empty_product(x, weight, True, x.dtype))
def multiply_and_gate_adapted(x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Operands) -> Tensor:
    """`multiply`, gated, with LoRA."""
    out = _empty_product(x, weight, True, x.dtype)
    _launch_unfused(x, weight, bias, True, out, adapters.shrunk(x))
    return out


@custom_op("multiply", result=_empty_product)
def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, dtype: torch.dtype) -> Tensor:
    """Returns `x @ weight.T + bias`, gated if asked, of dense rows x [T, in], by an unfused kernel of ours.

    If the tile has parts: float32 split-K partials [parts, T, out], whatever `dtype`.
    """
    out = _empty_product(x, weight, gated, dtype)
    _launch_unfused(x, weight, bias, gated, out)
    return out


@custom_op("multiply_into", mutates_args=("out",))
def multiply_into(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Puts `x @ weight.T` into dense rows `out` [T, out], by a kernel of ours without split-K partials."""
    tile = _tile(x, weight, gated=False)
    if isinstance(tile, UNFUSED):
        assert isinstance(tile, WideTile) or tile.parts == 1, tile
        _launch_unfused(x, weight, None, False, out)
    else:
        _launch_fused(FusedLayer(x, weight, None, None, 0.0, False, None, out.dtype), out)


def _launch_unfused(
    x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, out: Tensor, shrunk: Shrunk | None = None
) -> None:
    tile = _unfused_tile(x, weight, gated)
    if isinstance(tile, WideTile):
        launch_wide(x, weight, bias, out, tile, shrunk=shrunk)
    else:
        launch_skinny(x, weight, bias, gated, out, tile, shrunk)


# LoRA on products of a library, or of a kernel that cannot add it: "shrink" runs on a side stream beside the
# product. Neither needs the other, and library kernels take their time to start.


def _empty_plain(x: Tensor, weight: Tensor, by_library: bool) -> Tensor:
    if by_library:
        return x.new_empty(x.size(0), weight.size(0))
    return _empty_product(x, weight, False, x.dtype)


def _empty_deltas(x: Tensor, adapters: Operands) -> Tensor:
    return x.new_empty(x.size(0), adapters.b.size(1), dtype=torch.float32)


def _plain_product(x: Tensor, weight: Tensor, bias: Tensor | None, by_library: bool) -> Tensor:
    if by_library:
        return functional.linear(x, weight, bias)
    return multiply(x, weight, bias, False, x.dtype)


@custom_op("multiply_adapted", result=_empty_plain)
def multiply_adapted(
    x: Tensor, weight: Tensor, bias: Tensor | None, by_library: bool, adapters: Operands
) -> Tensor:
    """`products.linear_in_parts` with LoRA, of rows x [T, in]: dense ones, or by a library any."""
    shrunk = adapters.room_for_shrunk(x)
    with side_stream.forked(x.device):
        shrunk.launch(x)
    product = _plain_product(x, weight, bias, by_library)
    side_stream.join(x.device)
    shrunk.add_to(product if product.dim() == 2 else product.select(0, 0), plain=True)
    return product


@custom_op(
    "multiply_beside_adapters",
    result=lambda x, weight, by_library, adapters: (
        _empty_plain(x, weight, by_library),
        _empty_deltas(x, adapters),
    ),
)
def multiply_beside_adapters(
    x: Tensor, weight: Tensor, bias: Tensor | None, by_library: bool, adapters: Operands
) -> tuple[Tensor, Tensor]:
    """Returns the product, and apart from it LoRA's part, float32 [T, out], made beside the product."""
    shrunk, deltas = adapters.room_for_shrunk(x), _empty_deltas(x, adapters)
    with side_stream.forked(x.device):
        shrunk.launch(x)
        shrunk.put_to(deltas, plain=True)
    product = _plain_product(x, weight, bias, by_library)
    side_stream.join(x.device)
    return product, deltas


def _empty_results(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    return x.new_empty(x.size(0), weight.size(0) // (2 if gated else 1))


@custom_op("multiply_prompt", result=_empty_results)
def multiply_prompt(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    """Returns `x @ weight.T + bias`, gated if asked, of rows x [T, in] of thousands of tokens."""
    out = _empty_results(x, weight, gated)
    launch_prompt(x, weight, bias, out)
    return out


@custom_op("add_product", mutates_args=("rows",))
def add_product(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor) -> None:
    """Adds `x @ weight.T + bias`, rounded, to dense rows [T, out]."""
    launch_prompt(x, weight, bias, rows, added=True)


def _empty_projected(scaled: Tensor, weight: Tensor, gated: bool) -> Tensor:
    return _empty_results(scaled, weight, gated)


@custom_op("project_scaled", result=_empty_projected)
def project_scaled(
    scaled: Tensor, squares: Tensor, weight: Tensor, bias: Tensor | None, eps: float, gated: bool
) -> Tensor:
    """See `scaled_rows.project`."""
    out, tile = _empty_results(scaled, weight, gated), _wide_tile(scaled, weight, gated)
    launch_wide(scaled, weight, bias, out, tile, squares=squares, eps=eps)
    return out


@custom_op("project_scaled_adapted", result=_empty_projected)
def project_scaled_adapted(
    scaled: Tensor,
    squares: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    gated: bool,
    adapters: Operands,
) -> Tensor:
    """`project_scaled` with LoRA, added before the norm's factor."""
    out, tile = _empty_results(scaled, weight, gated), _wide_tile(scaled, weight, gated)
    launch_wide(scaled, weight, bias, out, tile, squares=squares, eps=eps, shrunk=adapters.shrunk(scaled))
    return out


@custom_op("add_projected", mutates_args=("rows",), result=empty_scaled)
def add_projected(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """See `scaled_rows.add_projected`; to dense `rows` [T, H]. Returns the scaled sums and their squares."""
    return _add_projected(x, weight, bias, rows, norm_weight)


@custom_op("add_projected_adapted", mutates_args=("rows",), result=empty_scaled)
def add_projected_adapted(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, norm_weight: Tensor, adapters: Operands
) -> tuple[Tensor, Tensor]:
    """`add_projected` with LoRA."""
    return _add_projected(x, weight, bias, rows, norm_weight, adapters.shrunk(x))


def _add_projected(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    norm_weight: Tensor,
    shrunk: Shrunk | None = None,
) -> tuple[Tensor, Tensor]:
    scaled, squares = empty_scaled(rows)
    launch_wide(
        x,
        weight,
        bias,
        rows,
        _wide_tile(x, weight, False),
        norm_weight=norm_weight,
        scaled=scaled,
        new_squares=squares,
        shrunk=shrunk,
    )
    return scaled, squares


def _tile(x: Tensor, weight: Tensor, *, gated: bool) -> Tile:
    return choose_for(weight, gated, x.size(0), x.dtype, x.device)


def _unfused_tile(x: Tensor, weight: Tensor, gated: bool) -> SkinnyTile | WideTile:
    tile = _tile(x, weight, gated=gated)
    assert isinstance(tile, UNFUSED), tile
    return tile


def _wide_tile(x: Tensor, weight: Tensor, gated: bool) -> WideTile:
    tile = _tile(x, weight, gated=gated)
    assert isinstance(tile, WideTile), tile
    return tile
