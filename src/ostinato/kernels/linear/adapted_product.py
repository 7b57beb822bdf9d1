"""A product by any kernel that only multiplies, and what adapters add to it where it lies, or lay beside it.

What the adapters do first, from the width of the layer to a few ranks, runs beside the product: neither needs
the other, and kernels of a library take their time to start.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .. import side_stream
from ..custom_op import custom_op
from ..lora.deltas import Operands, Shrunk
from . import triton_linear


@custom_op("multiply_adapted")
def multiply_adapted(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    by_library: bool,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    order: Tensor,
    blocks: Tensor,
    second: int,
    third: int,
) -> Tensor:
    """As `products.linear_in_parts`, of rows x [T, in]: dense ones, or by a library any."""
    adapters = Operands(a, b, ranks, slots, order, blocks, second, third)
    shrinker = adapters.shrinker_of(x)
    sums = shrinker.room_for_sums(x, a)
    with side_stream.forked(x.device):
        shrinker.launch_shrink(x, None, a, b.size(2), ranks, order, blocks, sums, plain=True)
    product = _product(x, weight, bias, by_library)
    side_stream.join(x.device)
    Shrunk(sums, adapters).add_to(product if product.dim() == 2 else product.select(0, 0), plain=True)
    return product


@multiply_adapted.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    by_library: bool,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    order: Tensor,
    blocks: Tensor,
    second: int,
    third: int,
) -> Tensor:
    return _room(x, weight, bias, by_library)


@custom_op("multiply_beside_adapters")
def multiply_beside_adapters(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    by_library: bool,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    order: Tensor,
    blocks: Tensor,
    second: int,
    third: int,
) -> tuple[Tensor, Tensor]:
    """The product, and apart from it `Deltas`: float32 [T, out], all of which runs beside the product."""
    adapters = Operands(a, b, ranks, slots, order, blocks, second, third)
    shrinker = adapters.shrinker_of(x)
    sums, deltas = shrinker.room_for_sums(x, a), _room_for_deltas(x, b)
    with side_stream.forked(x.device):
        shrinker.launch_shrink(x, None, a, b.size(2), ranks, order, blocks, sums, plain=True)
        Shrunk(sums, adapters).put_to(deltas, plain=True)
    product = _product(x, weight, bias, by_library)
    side_stream.join(x.device)
    return product, deltas


@multiply_beside_adapters.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    by_library: bool,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    order: Tensor,
    blocks: Tensor,
    second: int,
    third: int,
) -> tuple[Tensor, Tensor]:
    return _room(x, weight, bias, by_library), _room_for_deltas(x, b)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, by_library: bool) -> Tensor:
    if by_library:
        return functional.linear(x, weight, bias)
    return triton_linear.multiply(x, weight, bias, False, x.dtype)


def _room(x: Tensor, weight: Tensor, bias: Tensor | None, by_library: bool) -> Tensor:
    if by_library:
        return x.new_empty(x.size(0), weight.size(0))
    return torch.empty_like(triton_linear.multiply(x, weight, bias, False, x.dtype))


def _room_for_deltas(x: Tensor, b: Tensor) -> Tensor:
    return x.new_empty(x.size(0), b.size(1), dtype=torch.float32)
