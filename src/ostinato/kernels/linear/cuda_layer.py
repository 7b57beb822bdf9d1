"""What the CUDA kernels for linear layers have in common: a layer with its neighbours."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..cuda.compiled import CudaKernel
from ..lora.deltas import Shrunk
from .tiles import MOST_TOKENS, FragmentsTile, MatrixShape, StreamedTile


def layer_constants(
    shape: MatrixShape, *, norm: bool, bias: bool, residual: bool, adapted: bool, dtype: torch.dtype
) -> dict[str, int]:
    """What a layer is compiled for beside its tile; results in `dtype`."""
    return {
        "IN": shape.in_features,
        "GATED": shape.gated,
        "NORM": norm,
        "BIAS": bias,
        "RESIDUAL": residual,
        "ADAPTED": adapted,
        "OUT_FLOAT": dtype == torch.float32,
    }


def layer_shape(x: Tensor, weight: Tensor, out: Tensor) -> MatrixShape:
    """Of a weight, gated if it has twice as many rows as there are results."""
    return MatrixShape(out.size(1), x.size(1), weight.size(0) == 2 * out.size(1))


def layer_tensors(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
) -> tuple[Tensor, ...]:
    """In the order of the kernels' parameters; x in place of what there is not."""
    norm = x if norm_weight is None else norm_weight
    assert not (x.data_ptr() | weight.data_ptr() | norm.data_ptr()) % 16, "16 bytes are loaded at a time"
    return weight, norm, x if bias is None else bias, x, x if residual is None else residual, out


def low_rank_operands(shrunk: Shrunk) -> tuple[Tensor | int, ...]:
    """What adapters add, in the order of the kernels' parameters."""
    assert shrunk.sums.size(0) == 1, "nothing is left to be added"
    of = shrunk.of
    assert not (of.second | of.third) % 4, "results are finished in fours, of one part"
    sizes = of.blocks.size(1), of.b.size(2), shrunk.sums.size(2)
    return (shrunk.sums, of.b, of.ranks, of.slots, of.blocks, *sizes, of.second, of.third)


def launch_sliced(
    make_kernel: Callable[..., CudaKernel],
    count_shared_bytes: Callable[..., int],
    tile: FragmentsTile | StreamedTile,
    num_warps: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    out: Tensor,
    shrunk: Shrunk | None = None,
) -> None:
    """Queue the kernel of a tile; all operands dense and bfloat16, `out` that or float32.

    `make_kernel` and `count_shared_bytes` take tile, shape and the tokens to compile for.
    """
    num_tokens, shape = x.size(0), layer_shape(x, weight, out)
    assert num_tokens <= MOST_TOKENS[type(tile)], num_tokens
    tokens, norm = tile.compiled_tokens(num_tokens), norm_weight is not None
    form = {"norm": norm, "bias": bias is not None, "residual": residual is not None}
    form |= {"adapted": shrunk is not None}
    shared_bytes = count_shared_bytes(tile, shape, tokens, norm=norm)
    make_kernel(tile, shape, tokens, **form, dtype=out.dtype).launch(
        grid=(shape.out_features // tile.rows * tile.slices, 1, 1),
        block=num_warps * 32,
        args=(
            *layer_tensors(x, weight, bias, norm_weight, residual, out),
            *(() if shrunk is None else low_rank_operands(shrunk)),
            num_tokens,
            shape.out_features,
            float(eps),
        ),
        shared_bytes=shared_bytes,
        cluster=tile.slices,
    )
