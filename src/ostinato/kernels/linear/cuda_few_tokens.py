"""Launches the CUDA kernels of linear layers with few tokens: norm before, gate and residual after, in one.

| tokens | weights | tile | source |
|---|---|---|---|
| 1 | in registers; each warp has whole rows | `CudaGemvTile` | `gemv.cu` |
| 2 to 16 | the CTA's part resident on the SM before the wait | `FragmentsTile` | `few_tokens.cu` |
| 2 to 16 | streamed through shared memory, many steps ahead | `StreamedTile` | `few_tokens.cu`, `STREAMED` |
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..cuda.compiled import CudaKernel, cuda_kernel
from ..lora.low_rank import Deltas, Shrunk
from ..on_chip_memory import MOSTLY_L1
from .tiles import MOST_TOKENS, CudaGemvTile, FragmentsTile, MatrixShape, StreamedTile


class FusedLayer(NamedTuple):
    """A linear layer with its neighbours: `residual + gate(norm(x) @ weight.T + bias)`, all rows dense."""

    x: Tensor
    """[T, in]."""
    weight: Tensor
    """[out, in]; of a gated layer [2 * out, in]."""
    bias: Tensor | None
    norm_weight: Tensor | None
    """[in]; None: x is not normalised."""
    eps: float
    gated: bool
    """silu(first half) * second half of the product."""
    residual: Tensor | None
    """[T, out]."""
    dtype: torch.dtype
    """Of the results; sums are float32 and rounded once."""

    @property
    def shape(self) -> MatrixShape:
        """Returns the shape by which kernels are chosen."""
        rows, columns = self.weight.shape
        return MatrixShape(rows // 2 if self.gated else rows, columns, self.gated)

    def empty_result(self) -> Tensor:
        """Allocates [T, out] of `dtype`."""
        return self.x.new_empty(self.x.size(0), self.shape.out_features, dtype=self.dtype)

    def constants(self, *, adapted: bool) -> dict[str, bool | torch.dtype]:
        """Returns which of the neighbours there are: what a kernel is compiled for beside its tile."""
        return {
            "norm": self.norm_weight is not None,
            "bias": self.bias is not None,
            "residual": self.residual is not None,
            "adapted": adapted,
            "dtype": self.dtype,
        }

    def pointers(self, out: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors in the order of the kernels' parameters; x in place of those that are None."""
        x, weight, bias, norm_weight, _, _, residual, _ = self
        norm = x if norm_weight is None else norm_weight
        assert not (x.data_ptr() | weight.data_ptr() | norm.data_ptr()) % 16, "16 bytes are loaded at a time"
        return weight, norm, x if bias is None else bias, x, x if residual is None else residual, out


def low_rank_operands(shrunk: Shrunk) -> tuple[Tensor | int, ...]:
    """Returns the operands of LoRA in the order of the kernels' parameters."""
    assert shrunk.sums.size(0) == 1, "split-K partials are added up before"
    of = shrunk.of
    assert not (of.second | of.third) % 4, "a thread finishes four rows, all of one part of the layer"
    sizes = of.blocks.size(1), of.b.size(2), shrunk.sums.size(2)
    return (shrunk.sums, of.b, of.ranks, of.slots, of.blocks, *sizes, of.second, of.third)


def _layer_constants(
    shape: MatrixShape, *, norm: bool, bias: bool, residual: bool, adapted: bool, dtype: torch.dtype
) -> dict[str, int]:
    """Returns the macros that all three kernels have."""
    return {
        "IN": shape.in_features,
        "GATED": shape.gated,
        "NORM": norm,
        "BIAS": bias,
        "RESIDUAL": residual,
        "ADAPTED": adapted,
        "OUT_FLOAT": dtype == torch.float32,
    }


def gemv_kernel(
    tile: CudaGemvTile,
    shape: MatrixShape,
    *,
    norm: bool,
    bias: bool = False,
    residual: bool = False,
    adapted: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> CudaKernel:
    """Returns `gemv.cu` with this tile; results in `dtype`."""
    assert tile.fits(shape), (shape, tile)
    return cuda_kernel(
        "gemv.cu",
        "project",
        ROWS=tile.rows,
        WARPS=tile.num_warps,
        REGISTERS=tile.registers,
        **_layer_constants(shape, norm=norm, bias=bias, residual=residual, adapted=adapted, dtype=dtype),
    )


def few_tokens_kernel(
    tile: FragmentsTile | StreamedTile,
    shape: MatrixShape,
    tokens: int,
    *,
    norm: bool,
    bias: bool = False,
    residual: bool = False,
    adapted: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> CudaKernel:
    """Returns `few_tokens.cu` with this tile, for up to so many tokens; results in `dtype`."""
    assert tile.fits(shape), (shape, tile)
    if isinstance(tile, FragmentsTile):
        how = {"WARPS": tile.num_warps, "HELD": tile.held}
    else:
        how = {"SHARES": tile.shares, "CHUNK": tile.chunk, "SLOTS": tile.slots, "AHEAD": tile.ahead}
    return cuda_kernel(
        "few_tokens.cu",
        "project",
        STREAMED=isinstance(tile, StreamedTile),
        ROWS=tile.rows,
        SLICES=tile.slices,
        REGISTERS=tile.registers,
        TOKENS=tokens,
        SHARED_BYTES=tile.shared_bytes(shape, tokens, norm=norm),
        **how,
        **_layer_constants(shape, norm=norm, bias=bias, residual=residual, adapted=adapted, dtype=dtype),
    )


def launch_gemv(layer: FusedLayer, out: Tensor, tile: CudaGemvTile, deltas: Deltas | None = None) -> None:
    """Queues the kernel for one token; operands are bfloat16, `out` that or float32."""
    assert layer.x.size(0) == 1, "one token"
    shape = layer.shape
    gemv_kernel(tile, shape, **layer.constants(adapted=deltas is not None)).launch(  # type: ignore[arg-type]
        grid=(shape.out_features // (tile.rows * tile.num_warps), 1, 1),
        block=tile.num_warps * 32,
        args=(*layer.pointers(out), *(deltas or (layer.x, layer.x)), shape.out_features, float(layer.eps)),
        shared_share=MOSTLY_L1,
    )


def launch_few_tokens(
    layer: FusedLayer, out: Tensor, tile: FragmentsTile | StreamedTile, shrunk: Shrunk | None = None
) -> None:
    """Queues the kernel of either tile; operands are bfloat16, `out` that or float32."""
    num_tokens, shape = layer.x.size(0), layer.shape
    assert num_tokens <= MOST_TOKENS[type(tile)], num_tokens
    tokens, constants = tile.compiled_tokens(num_tokens), layer.constants(adapted=shrunk is not None)
    num_warps = tile.num_warps if isinstance(tile, FragmentsTile) else tile.num_warps(shape)
    few_tokens_kernel(tile, shape, tokens, **constants).launch(  # type: ignore[arg-type]
        grid=(shape.out_features // tile.rows * tile.slices, 1, 1),
        block=num_warps * 32,
        args=(
            *layer.pointers(out),
            *(() if shrunk is None else low_rank_operands(shrunk)),
            num_tokens,
            shape.out_features,
            float(layer.eps),
        ),
        shared_bytes=tile.shared_bytes(shape, tokens, norm=layer.norm_weight is not None),
        cluster=tile.slices,
    )
