"""Which kernel and tile a linear layer runs with: measured where it was measured, else a rule.

The choice follows from the shape of the matrix and the number of tokens, never from timing at run time:
nothing may be tuned while a graph is captured. The measurements are those of docs/kernels.md: on an H200,
each layer as part of a captured chain of all layers of Qwen3-0.6B, Llama-3.2-1B or Llama-3.1-8B.
"""

from dataclasses import dataclass
from typing import NamedTuple


class MatrixShape(NamedTuple):
    """A weight, or the two halves of a gated one."""

    out_features: int
    in_features: int
    gated: bool = False


@dataclass(frozen=True)
class GemvTile:
    """The work of a program of `triton_gemv`."""

    rows: int
    """Rows of the matrix."""
    block: int
    """Columns at a time."""
    num_warps: int


@dataclass(frozen=True)
class ResidentTile:
    """The work of a program of `triton_resident`."""

    rows: int
    """Rows of the matrix."""
    slices: int
    """Parts of the sum that warps take in parallel."""
    width: int
    """Columns of a slice at a time."""
    num_warps: int


@dataclass(frozen=True)
class SkinnyTile:
    """The work of a program of `triton_skinny`."""

    tokens: int
    rows: int
    """Rows of the matrix."""
    block: int
    """Columns at a time."""
    num_warps: int
    num_stages: int


RESIDENT_TOKENS = 16
"""Tokens that one pass of `triton_resident` takes."""

SKINNY_TOKENS = (16, 64, 128)
"""Largest steps with skinny tiles of their own; larger ones run through cuBLAS."""

_GEMV: dict[MatrixShape, GemvTile] = {
    MatrixShape(4096, 1024): GemvTile(4, 1024, 4),
    MatrixShape(1024, 2048): GemvTile(4, 2048, 8),
    MatrixShape(3072, 1024, True): GemvTile(4, 1024, 4),
    MatrixShape(1024, 3072): GemvTile(4, 4096, 8),
    MatrixShape(151936, 1024): GemvTile(8, 1024, 4),
    MatrixShape(3072, 2048): GemvTile(4, 1024, 4),
    MatrixShape(2048, 2048): GemvTile(4, 2048, 4),
    MatrixShape(8192, 2048, True): GemvTile(1, 2048, 4),
    MatrixShape(2048, 8192): GemvTile(4, 4096, 8),
    MatrixShape(6144, 4096): GemvTile(2, 4096, 4),
    MatrixShape(4096, 4096): GemvTile(4, 1024, 4),
    MatrixShape(14336, 4096, True): GemvTile(2, 4096, 8),
    MatrixShape(4096, 14336): GemvTile(4, 1024, 4),
}

_RESIDENT: dict[MatrixShape, ResidentTile] = {
    MatrixShape(4096, 1024): ResidentTile(32, 4, 64, 4),
    MatrixShape(1024, 2048): ResidentTile(8, 4, 256, 4),
    MatrixShape(3072, 1024, True): ResidentTile(16, 4, 256, 4),
    MatrixShape(1024, 3072): ResidentTile(8, 4, 256, 4),
}

# By the largest number of tokens, one of SKINNY_TOKENS; where one is missing, cuBLAS is faster.
_SKINNY: dict[MatrixShape, dict[int, SkinnyTile]] = {
    MatrixShape(1024, 2048): {64: SkinnyTile(64, 16, 128, 4, 5), 128: SkinnyTile(64, 32, 128, 4, 4)},
    MatrixShape(3072, 1024, True): {64: SkinnyTile(64, 16, 128, 4, 4), 128: SkinnyTile(64, 32, 128, 4, 3)},
    MatrixShape(1024, 3072): {64: SkinnyTile(64, 16, 256, 4, 3), 128: SkinnyTile(64, 16, 256, 4, 3)},
    MatrixShape(151936, 1024): {
        16: SkinnyTile(16, 128, 128, 4, 3),
        64: SkinnyTile(64, 64, 128, 4, 3),
        128: SkinnyTile(128, 128, 64, 8, 4),
    },
}

# Columns that one program holds in registers before it waits.
_WIDEST = 4096


def gemv_tile(shape: MatrixShape) -> GemvTile:
    """For one token; there is one for any matrix."""
    if tile := _GEMV.get(shape):
        return tile
    block = 1 << max(shape.in_features - 1, 1).bit_length()
    if block > _WIDEST:
        return GemvTile(rows=2, block=2048, num_warps=4)
    # 4096 elements a program and 128 threads: enough in flight, and room for the next kernel's programs.
    return GemvTile(rows=max(1, 4096 // block), block=block, num_warps=4)


def resident_tile(shape: MatrixShape) -> ResidentTile | None:
    """For 2 to 16 tokens; None where it was not measured to win."""
    return _RESIDENT.get(shape)


def skinny_tile(shape: MatrixShape, num_tokens: int) -> SkinnyTile | None:
    """For up to 128 tokens; None where cuBLAS wins or nothing was measured."""
    limit = next((limit for limit in SKINNY_TOKENS if num_tokens <= limit), 0)
    return _SKINNY.get(shape, {}).get(limit)
