"""How a linear layer can be run: the kernels, and what a CTA of each takes as its work.

Which of them a layer gets follows from its shape and the number of tokens: see `choice`.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

MOST_REGISTERS = 255
"""Of a thread."""
MOST_SHARED_BYTES = 227 << 10
"""Of a CTA, where kernels in CUDA C++ run."""
_MOST_PROGRAMS_OF_A_CLUSTER, _MOST_WARPS, _REGISTERS_OF_A_MULTIPROCESSOR = 8, 32, 65536
_FEWEST_REGISTERS = 32
_OTHER_REGISTERS = 24
"""Of a thread of `cuda_gemv` beside its weights, at least."""
_OTHER_WIDE_REGISTERS = 26
"""Of a thread of `cuda_wide` beside its sums, at least."""
_COLUMNS_OF_A_BOX, _MOST_ROWS_OF_A_BOX = 64, 256
_ELEMENTS_OF_16_BYTES = 8
_CLUSTERS = (1, 2, 4, 8)
WIDTHS = (16, 32, 40, 48, 64)
"""Tokens that the tensor cores of four warps take at once, of those that `warpgroup.cuh` has."""


def _fit_registers(registers: int, num_warps: int) -> bool:
    """Tells whether each thread of a CTA can have so many registers.

    The GPU gives them out by eights, and each quarter of a SM has its own for every fourth warp.
    """
    of_program = -(-registers // 8) * 8 * 32 * (-(-num_warps // 4) * 4)
    return _FEWEST_REGISTERS <= registers <= MOST_REGISTERS and of_program <= _REGISTERS_OF_A_MULTIPROCESSOR


class MatrixShape(NamedTuple):
    """A weight, or the two halves of a gated one."""

    out_features: int
    in_features: int
    gated: bool = False


@dataclass(frozen=True)
class GemvTile:
    """The work of a CTA of `triton_gemv`, which takes one token."""

    rows: int
    """Rows of the matrix."""
    block: int
    """Columns at a time."""
    num_warps: int


@dataclass(frozen=True)
class CudaGemvTile:
    """The work of `cuda_gemv`, which takes one token."""

    rows: int
    """Rows of the matrix that a warp takes, of each half if it is gated."""
    num_warps: int
    """Of a CTA."""
    registers: int
    """Of a thread, at most."""

    def held(self, shape: MatrixShape) -> int:
        """Registers of a thread that hold weights."""
        return self.rows * (2 if shape.gated else 1) * shape.in_features // 64

    def fits(self, shape: MatrixShape) -> bool:
        """Tells whether the matrix can be divided like that, and a thread hold its part."""
        return (
            shape.in_features % 256 == 0
            and shape.out_features % (self.rows * self.num_warps) == 0
            and self.rows <= 32
            and self.held(shape) + _OTHER_REGISTERS <= self.registers
            and self.num_warps <= _MOST_WARPS
            and _fit_registers(self.registers, self.num_warps)
        )


@dataclass(frozen=True)
class FragmentsTile:
    """The work of a CTA of `cuda_fragments`."""

    rows: int
    """Rows of the matrix, of each half if it is gated."""
    slices: int
    """CTAs, neighbours in a cluster, that share the columns."""
    num_warps: int
    """Of a CTA; they share its columns."""
    held: int
    """Tiles of 8 rows that stay in registers; the others wait in shared memory."""
    registers: int
    """Of a thread, at most."""

    @staticmethod
    def compiled_tokens(num_tokens: int) -> int:
        """Tokens that it is compiled for; there are never more."""
        return 8 if num_tokens <= 8 else 16

    def shared_bytes(self, shape: MatrixShape, num_tokens: int, *, norm: bool) -> int:
        """Returns `sizeof(Shared)` of `few_tokens.cu`."""
        tokens = self.compiled_tokens(num_tokens)
        rows = self.rows * (2 if shape.gated else 1)
        steps = shape.in_features // self.slices // self.num_warps // 32
        staged = max(1, (rows // 8 - self.held + norm) * steps) * self.num_warps * 32
        padding = 4 if tokens == 8 else 8 if rows % 16 == 0 else 0
        parts = self.num_warps * tokens * (rows + padding + 1)
        from_cluster = rows if self.slices > 1 else 4
        return staged * 16 + (parts + tokens * from_cluster + self.slices * tokens) * 4 + 16

    def fits(self, shape: MatrixShape) -> bool:
        """Tells whether the matrix can be divided like that."""
        per_warp, rest = divmod(shape.in_features, self.slices * self.num_warps)
        rows = self.rows * (2 if shape.gated else 1)
        return (
            rest == 0
            and per_warp % 32 == 0
            and shape.out_features % self.rows == 0
            and self.rows % (4 * self.slices) == 0
            and rows % 8 == 0
            and self.held <= rows // 8
            and self.slices <= _MOST_PROGRAMS_OF_A_CLUSTER
            and self.num_warps <= _MOST_WARPS
            and _fit_registers(self.registers, self.num_warps)
        )


@dataclass(frozen=True)
class StreamedTile:
    """The work of a CTA of `cuda_streamed`; a warp takes 16 rows of the matrix, 8 of each half."""

    rows: int
    """Rows of the matrix, of each half if it is gated."""
    slices: int
    """CTAs, neighbours in a cluster, that share the columns."""
    shares: int
    """Warps of a CTA that share its columns of a row."""
    chunk: int
    """Columns of each share for which tokens come at a time."""
    slots: int
    """Chunks of tokens that are there or on their way."""
    ahead: int
    """Steps of 32 columns that the weights of a warp are ahead."""
    registers: int
    """Of a thread, at most."""

    def num_warps(self, shape: MatrixShape) -> int:
        """Returns the warps of a CTA."""
        return self.rows // (8 if shape.gated else 16) * self.shares

    @staticmethod
    def compiled_tokens(num_tokens: int) -> int:
        """Tokens that it is compiled for; there are never more."""
        return 8 if num_tokens <= 8 else 16

    def shared_bytes(self, shape: MatrixShape, num_tokens: int, *, norm: bool) -> int:
        """Returns `sizeof(Shared)` of `few_tokens.cu`, `STREAMED`."""
        tokens, warps, halves = (
            self.compiled_tokens(num_tokens),
            self.num_warps(shape),
            2 if shape.gated else 1,
        )
        weights = self.ahead * 2 * warps * 32 * 16
        parts = self.shares * tokens * (warps // self.shares * 16 + 4) * 4
        norm_weight = (shape.in_features // self.slices if norm else 8) * 2
        chunks = self.slots * self.shares * tokens * (self.chunk + 32) * 2
        from_cluster = tokens * (halves * self.rows if self.slices > 1 else 4) * 4
        sums = (warps * 32 + tokens * (self.slices + 1)) * 4
        return max(weights, -(-parts // 16) * 16) + norm_weight + chunks + from_cluster + sums + 16

    def fits(self, shape: MatrixShape) -> bool:
        """Tells whether the matrix can be divided like that."""
        warps = self.num_warps(shape)
        return (
            self.rows % (8 if shape.gated else 16) == 0
            and shape.out_features % self.rows == 0
            and self.rows % (4 * self.slices) == 0
            and self.slices <= _MOST_PROGRAMS_OF_A_CLUSTER
            and shape.in_features % (self.slices * self.shares * self.chunk) == 0
            and self.chunk % 64 == 0
            and self.ahead <= shape.in_features // (self.slices * self.shares * 32)
            and self.ahead <= (self.slots - 1) * self.chunk // 32
            and warps <= _MOST_WARPS
            and _fit_registers(self.registers, warps)
        )


@dataclass(frozen=True)
class WideTile:
    """The work of a CTA of `cuda_wide`."""

    tokens: int
    rows: int
    """Rows of the matrix, of each half if it is gated."""
    columns: int
    """Of the matrix and of the tokens, at a time."""
    weight_slots: int
    """So many such tiles of the matrix are there or on their way."""
    token_slots: int
    """The same of the tokens."""
    slices: int = 1
    """CTAs of a cluster that share the columns."""

    @property
    def owned(self) -> int:
        """Tokens that a CTA of a cluster finishes; the last one perhaps fewer."""
        return -(-self.tokens // (self.slices * 4)) * 4

    def num_threads(self, shape: MatrixShape) -> int:
        """Returns the threads of a CTA: those that multiply, and a TMA producer warp."""
        return self.rows * (2 if shape.gated else 1) * 2 + 32

    def shared_bytes(self, shape: MatrixShape, num_tokens: int = 0, *, norm: bool) -> int:
        """Returns `sizeof(Shared)` of `wide.cu`, which is the same for any number of tokens."""
        rows = self.rows * (2 if shape.gated else 1)
        rings = (self.weight_slots * rows + self.token_slots * self.tokens) * self.columns * 2
        part = rows * (self.owned + (4 if self.owned % 8 == 0 else 0)) * 4
        from_cluster = max((self.slices - 1) * part, 16)
        squares = (rows * 2 // self.owned + 1) * self.owned * 4 if norm else 16
        counts = (2 * (self.weight_slots + self.token_slots) + 1) * 8
        return max(rings, self.slices * part) + from_cluster + squares + counts

    def fits(self, shape: MatrixShape) -> bool:
        """Tells whether the matrix can be divided like that."""
        steps, rest = divmod(shape.in_features, self.slices * self.columns)
        rows = self.rows * (2 if shape.gated else 1)
        return (
            rest == 0
            and self.columns % _COLUMNS_OF_A_BOX == 0
            and self.tokens in WIDTHS
            and self.owned * (self.slices - 1) < self.tokens
            and rows % 64 == 0
            and shape.out_features % self.rows == 0
            and self.slices in _CLUSTERS
            and self.num_threads(shape) <= _MOST_WARPS * 32
            and 2 <= self.weight_slots <= steps  # one is free again when the next is being multiplied
            and 2 <= self.token_slots <= steps
            and self.rows <= _MOST_ROWS_OF_A_BOX
            and _fit_registers(self.tokens // 2 + _OTHER_WIDE_REGISTERS, self.num_threads(shape) // 32)
        )


@dataclass(frozen=True)
class PromptTile:
    """The work of a CTA of `cuda_prompt`: the same for all matrices."""

    def fits(self, shape: MatrixShape) -> bool:
        """Tells whether rows of the matrix, and of results, are aligned."""
        return (
            shape.in_features % _ELEMENTS_OF_16_BYTES == 0 and shape.out_features % _ELEMENTS_OF_16_BYTES == 0
        )


@dataclass(frozen=True)
class SkinnyTile:
    """The work of a CTA of `triton_skinny`."""

    tokens: int
    rows: int
    """Rows of the matrix, of each half if it is gated."""
    block: int
    """Columns at a time."""
    num_warps: int
    num_stages: int
    parts: int = 1
    """CTAs that share the columns; the reader of the result adds their parts."""


@dataclass(frozen=True)
class Library:
    """cuBLAS, which divides the work by itself."""


Tile = GemvTile | CudaGemvTile | FragmentsTile | StreamedTile | WideTile | PromptTile | SkinnyTile | Library
FUSED = (GemvTile, CudaGemvTile, FragmentsTile, StreamedTile)
"""Kernels that do norm, gate and residual on the way."""
UNFUSED = (SkinnyTile, WideTile)
"""Kernels of ours that leave norm and residual to others."""
IN_CUDA = (CudaGemvTile, FragmentsTile, StreamedTile, WideTile, PromptTile)
"""Kernels in CUDA C++, which not every GPU can run; a matrix must fit."""
FOR_HOPPER = (WideTile, PromptTile)
"""Of these, what no other GPU can run."""

KERNELS: dict[str, type[Tile]] = {
    "gemv": GemvTile,
    "cuda_gemv": CudaGemvTile,
    "fragments": FragmentsTile,
    "streamed": StreamedTile,
    "wide": WideTile,
    "prompt": PromptTile,
    "skinny": SkinnyTile,
    "library": Library,
}
"""By the names that tables use."""

MOST_TOKENS: dict[type[Tile], int] = {
    GemvTile: 1,
    CudaGemvTile: 1,
    FragmentsTile: 16,
    StreamedTile: 16,
    WideTile: 64,
}
"""Of the kernels that take only so many."""


def compiled_variant(tile: Tile, num_tokens: int) -> Hashable:
    """Equal where the same kernel is compiled for a matrix."""
    if isinstance(tile, FragmentsTile | StreamedTile):
        return tile, tile.compiled_tokens(num_tokens)
    return tile
