"""The kernels of linear layers as custom ops; each picks its tile by shape."""

import torch
from torch import Tensor

from .. import dependent_launch
from ..custom_op import custom_op
from ..host_sizes import cdiv
from ..lora.deltas import Operands, Shrunk
from ..on_chip_memory import prefer_l1
from .choice import choose_for
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
from .triton_gemv import _gemv
from .triton_skinny import _skinny

MOST_SLOTS_AS_COLUMNS = 16
"""Of `triton_skinny`, which counts so many; with many adapters in a batch, one after the other is faster."""


@custom_op("project_few_tokens")
def project_few_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    gated: bool,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """See `few_tokens.project`; x is dense [T, in], and the choice for it a fused kernel."""
    out = x.new_empty(x.size(0), weight.size(0) // (2 if gated else 1), dtype=dtype)
    _launch_few_tokens(x, weight, bias, norm_weight, eps, gated, residual, out)
    return out


@project_few_tokens.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    gated: bool,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return x.new_empty(x.size(0), weight.size(0) // (2 if gated else 1), dtype=dtype)


@custom_op("project_few_adapted_tokens")
def project_few_adapted_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    gated: bool,
    residual: Tensor | None,
    dtype: torch.dtype,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    order: Tensor,
    blocks: Tensor,
    second: int,
    third: int,
) -> Tensor:
    """The same with what adapters add to the product: `lora.deltas.Operands`."""
    out = x.new_empty(x.size(0), weight.size(0) // (2 if gated else 1), dtype=dtype)
    adapters = Operands(a, b, ranks, slots, order, blocks, second, third)
    _launch_few_tokens(x, weight, bias, norm_weight, eps, gated, residual, out, adapters)
    return out


@project_few_adapted_tokens.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    gated: bool,
    residual: Tensor | None,
    dtype: torch.dtype,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    order: Tensor,
    blocks: Tensor,
    second: int,
    third: int,
) -> Tensor:
    return x.new_empty(x.size(0), weight.size(0) // (2 if gated else 1), dtype=dtype)


@custom_op("multiply_and_gate_adapted")
def multiply_and_gate_adapted(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    order: Tensor,
    blocks: Tensor,
    second: int,
    third: int,
) -> Tensor:
    """`multiply`, gated, with what adapters add to the product: `lora.deltas.Operands`."""
    tile = _unfused_tile(x, weight, True)
    out = _room(x, weight, True, x.dtype, tile)
    shrunk = Operands(a, b, ranks, slots, order, blocks, second, third).shrunk(x)
    _launch_unfused(x, weight, bias, True, out, tile, shrunk)
    return out


@multiply_and_gate_adapted.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    order: Tensor,
    blocks: Tensor,
    second: int,
    third: int,
) -> Tensor:
    return _room(x, weight, True, x.dtype, _unfused_tile(x, weight, True))


@custom_op("multiply")
def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, dtype: torch.dtype) -> Tensor:
    """`x @ weight.T + bias`, gated if asked, of dense rows x [T, in], by an unfused kernel of ours.

    Where a tile has parts: float32 [parts, T, out], whose sum it is, whatever `dtype`.
    """
    tile = _unfused_tile(x, weight, gated)
    out = _room(x, weight, gated, dtype, tile)
    _launch_unfused(x, weight, bias, gated, out, tile)
    return out


@multiply.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, dtype: torch.dtype) -> Tensor:
    return _room(x, weight, gated, dtype, _unfused_tile(x, weight, gated))


@custom_op("multiply_into", mutates_args=("out",))
def multiply_into(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """`x @ weight.T` into dense rows `out` [T, out], by a kernel of ours that leaves no parts."""
    tile = _choice(x, weight, gated=False)
    if isinstance(tile, UNFUSED):
        assert isinstance(tile, WideTile) or tile.parts == 1, tile
        _launch_unfused(x, weight, None, False, out, tile)
    else:
        _launch_few_tokens(x, weight, None, None, 0.0, False, None, out)


@multiply_into.register_fake
def _(x: Tensor, weight: Tensor, out: Tensor) -> None:
    return None


def _choice(x: Tensor, weight: Tensor, *, gated: bool) -> Tile:
    return choose_for(weight, gated, x.size(0), x.dtype, x.device)


def _unfused_tile(x: Tensor, weight: Tensor, gated: bool) -> SkinnyTile | WideTile:
    tile = _choice(x, weight, gated=gated)
    assert isinstance(tile, UNFUSED), tile
    return tile


def _room(x: Tensor, weight: Tensor, gated: bool, dtype: torch.dtype, tile: SkinnyTile | WideTile) -> Tensor:
    num_tokens, out_features = x.size(0), weight.size(0) // (2 if gated else 1)
    if isinstance(tile, SkinnyTile) and tile.parts > 1:
        return x.new_empty(tile.parts, num_tokens, out_features, dtype=torch.float32)
    return x.new_empty(num_tokens, out_features, dtype=dtype)


def _launch_few_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    gated: bool,
    residual: Tensor | None,
    out: Tensor,
    adapters: Operands | None = None,
) -> None:
    tile = _choice(x, weight, gated=gated)
    if isinstance(tile, FragmentsTile | StreamedTile):
        shrunk = adapters and adapters.shrunk(x, norm_weight)
    else:
        deltas = adapters and adapters.deltas(x, norm_weight)
    match tile:
        case GemvTile(rows, block, num_warps):
            launched = _gemv[(cdiv(out.size(1), rows),)](
                x,
                x if norm_weight is None else norm_weight,
                weight,
                x if bias is None else bias,
                x if residual is None else residual,
                out,
                eps,
                *(deltas or (x, x)),
                out_features=out.size(1),
                in_features=x.size(1),
                norm=norm_weight is not None,
                gated=gated,
                has_bias=bias is not None,
                has_residual=residual is not None,
                rows=rows,
                block=block,
                adapted=deltas is not None,
                num_warps=num_warps,
                enable_fp_fusion=True,
                **dependent_launch.options(x.device),
            )
            prefer_l1(launched)
        case CudaGemvTile():
            from .cuda_gemv import launch_gemv

            launch_gemv(x, weight, bias, norm_weight, eps, residual, out, tile, deltas)
        case FragmentsTile():
            from .cuda_fragments import launch_fragments

            launch_fragments(x, weight, bias, norm_weight, eps, residual, out, tile, shrunk)
        case StreamedTile():
            from .cuda_streamed import launch_streamed

            launch_streamed(x, weight, bias, norm_weight, eps, residual, out, tile, shrunk)
        case _:
            raise AssertionError(f"{tile} is not fused")


def _launch_unfused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    out: Tensor,
    tile: SkinnyTile | WideTile,
    shrunk: Shrunk | None = None,
) -> None:
    if isinstance(tile, WideTile):
        from .cuda_wide import launch_wide

        launch_wide(x, weight, bias, out, tile, shrunk=shrunk)
    else:
        _launch_skinny(x, weight, bias, gated, out, tile, shrunk)


def _launch_skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    out: Tensor,
    tile: SkinnyTile,
    shrunk: Shrunk | None,
) -> None:
    assert shrunk is None or (gated and shrunk.of.second == out.size(-1)), (
        "adapters add to the halves of a gate"
    )
    of = shrunk and shrunk.of
    num_tokens, in_features = x.shape
    out_features = out.size(-1)
    grid = (cdiv(num_tokens, tile.tokens), cdiv(out_features, tile.rows), tile.parts)
    _skinny[grid](
        x,
        weight,
        x if bias is None else bias,
        out,
        *((shrunk.sums, of.b, of.ranks, of.slots, of.blocks) if shrunk and of else (x,) * 5),
        of.blocks.size(1) if of else 0,
        num_tokens,
        out_features=out_features,
        in_features=in_features,
        gated=gated,
        has_bias=bias is not None,
        tokens=tile.tokens,
        rows=tile.rows,
        block=tile.block,
        parts=tile.parts,
        adapted=shrunk is not None,
        as_columns=of is not None and of.b.size(0) <= MOST_SLOTS_AS_COLUMNS,
        room=of.b.size(2) if of else 0,
        splits=shrunk.sums.size(0) if shrunk else 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,
        **dependent_launch.options(x.device),
    )
