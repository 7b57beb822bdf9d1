"""The two kinds of layers of `scaled_rows` as custom ops, both by `wide`."""

from torch import Tensor

from ..custom_op import custom_op
from ..lora.deltas import Operands, Shrunk
from ..squares import room_for_scaled
from .choice import choose_for
from .cuda_wide import launch_wide
from .tiles import WideTile


@custom_op("project_scaled")
def project_scaled(
    scaled: Tensor, squares: Tensor, weight: Tensor, bias: Tensor | None, eps: float, gated: bool
) -> Tensor:
    """See `scaled_rows.project`."""
    out = _results(scaled, weight, gated)
    launch_wide(scaled, weight, bias, out, _tile(scaled, weight, gated), squares=squares, eps=eps)
    return out


@project_scaled.register_fake
def _(
    scaled: Tensor, squares: Tensor, weight: Tensor, bias: Tensor | None, eps: float, gated: bool
) -> Tensor:
    return _results(scaled, weight, gated)


@custom_op("project_scaled_adapted")
def project_scaled_adapted(
    scaled: Tensor,
    squares: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    gated: bool,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    order: Tensor,
    blocks: Tensor,
    second: int,
    third: int,
) -> Tensor:
    """The same with what adapters add to the product before the norm's factor: `lora.deltas.Operands`."""
    out = _results(scaled, weight, gated)
    shrunk = Operands(a, b, ranks, slots, order, blocks, second, third).shrunk(scaled)
    tile = _tile(scaled, weight, gated)
    launch_wide(scaled, weight, bias, out, tile, squares=squares, eps=eps, shrunk=shrunk)
    return out


@project_scaled_adapted.register_fake
def _(
    scaled: Tensor,
    squares: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    gated: bool,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    order: Tensor,
    blocks: Tensor,
    second: int,
    third: int,
) -> Tensor:
    return _results(scaled, weight, gated)


@custom_op("add_projected", mutates_args=("rows",))
def add_projected(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """See `scaled_rows.add_projected`; to dense `rows` [T, H]. Returns the scaled sums and their squares."""
    return _add(x, weight, bias, rows, norm_weight)


def _add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    norm_weight: Tensor,
    shrunk: Shrunk | None = None,
) -> tuple[Tensor, Tensor]:
    scaled, squares = room_for_scaled(rows)
    launch_wide(
        x,
        weight,
        bias,
        rows,
        _tile(x, weight, gated=False),
        norm_weight=norm_weight,
        scaled=scaled,
        new_squares=squares,
        shrunk=shrunk,
    )
    return scaled, squares


@add_projected.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor]:
    return room_for_scaled(rows)


@custom_op("add_projected_adapted", mutates_args=("rows",))
def add_projected_adapted(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    norm_weight: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    order: Tensor,
    blocks: Tensor,
    second: int,
    third: int,
) -> tuple[Tensor, Tensor]:
    """The same with what adapters add to the product: `lora.deltas.Operands`."""
    shrunk = Operands(a, b, ranks, slots, order, blocks, second, third).shrunk(x)
    return _add(x, weight, bias, rows, norm_weight, shrunk)


@add_projected_adapted.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    norm_weight: Tensor,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    order: Tensor,
    blocks: Tensor,
    second: int,
    third: int,
) -> tuple[Tensor, Tensor]:
    return room_for_scaled(rows)


def _results(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    return x.new_empty(x.size(0), weight.size(0) // (2 if gated else 1))


def _tile(x: Tensor, weight: Tensor, gated: bool) -> WideTile:
    tile = choose_for(weight, gated, x.size(0), x.dtype, x.device)
    assert isinstance(tile, WideTile), tile
    return tile
