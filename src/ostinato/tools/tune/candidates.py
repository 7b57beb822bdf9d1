"""The tiles to try for a matrix at a number of tokens.

First a few of every kind, then those that differ from the best of them in one respect: trying all
combinations would take an hour of compiling.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ostinato.kernels.gpu import Gpu
from ostinato.kernels.linear.rules import (
    STREAMED_DEPTHS,
    STREAMED_REGISTERS,
    cuda_gemv_tile,
    room,
    skinny_with_most_stages,
    wide_with_most_slots,
)
from ostinato.kernels.linear.tiles import (
    MOST_TOKENS,
    WIDTHS,
    CudaGemvTile,
    FragmentsTile,
    GemvTile,
    Library,
    MatrixShape,
    SkinnyTile,
    StreamedTile,
    Tile,
    WideTile,
)

# Tokens, rows, columns at a time and warps of a skinny program, by the largest number of tokens of a step.
_SKINNY = {
    16: [(16, 64, 128, 4), (16, 64, 64, 4), (16, 32, 256, 4), (16, 32, 128, 4), (16, 128, 64, 8)],
    32: [(32, 64, 128, 4), (32, 64, 64, 4), (32, 32, 128, 4), (32, 128, 64, 8)],
    64: [(64, 64, 128, 4), (64, 64, 64, 4), (64, 32, 128, 4), (64, 32, 64, 4), (64, 128, 64, 8)],
}
_SKINNY_OF_MANY = [
    *((64, 64, 128, 4), (64, 64, 64, 4), (64, 32, 128, 4), (64, 128, 64, 8)),
    *((128, 64, 64, 8), (128, 64, 128, 8), (128, 128, 64, 8), (128, 32, 64, 4)),
]
# Counts of programs and warps are for a GPU with this many multiprocessors.
_MULTIPROCESSORS = 132
_FEWEST_PROGRAMS, _MOST_PROGRAMS = 96, 640
_FRAGMENTS_REGISTERS = {8: 88, 16: 128}
"""By the number of tokens that it is compiled for."""
_STREAMED_WARPS = range(3, 17)
"""Warps of a program of `streamed`."""
_FEWEST_STREAMED_WARPS, _MOST_STREAMED_PROGRAMS = 1024, 1024
"""Over all programs: this many must be under way to keep the memory busy."""
_COLUMNS_FOR_256_ROWS = 4096
"""Minimum: matrices of smaller models would have too few such programs."""
_FEW_ROWS, _FEWEST_PROGRAMS_OF_FEW_ROWS = 4096, 60
_FEW_TOKEN_BYTES = 32 << 10


def _on(gpu: Gpu, count: int) -> int:
    return count * gpu.multiprocessors // _MULTIPROCESSORS


def fused_tiles(shape: MatrixShape, num_tokens: int, *, cuda: bool, gpu: Gpu) -> list[Tile]:
    """Tiles of kernels with norm, gate and residual inside; `cuda`: whether those in CUDA C++ run here."""
    tiles: list[Tile] = []
    if num_tokens == 1:
        tiles += [
            GemvTile(rows, block, num_warps)
            for rows, block, num_warps in itertools.product((1, 2, 4, 8), (512, 1024, 2048, 4096), (4, 8))
            if 4096 <= rows * block <= 16384
        ]
        if cuda:
            tiles += _cuda_gemv_tiles(shape, gpu)
    if cuda and num_tokens <= MOST_TOKENS[FragmentsTile]:
        tiles += _fragments_tiles(shape, num_tokens, gpu)
    if cuda and 1 < num_tokens <= MOST_TOKENS[StreamedTile]:
        tiles += _streamed_tiles(shape, num_tokens, gpu)
    return tiles


def _cuda_gemv_tiles(shape: MatrixShape, gpu: Gpu) -> Iterator[CudaGemvTile]:
    for rows, num_warps in itertools.product((1, 2, 3, 4, 6), (2, 4, 8)):
        tile = cuda_gemv_tile(shape, rows, num_warps)
        programs = shape.out_features // (rows * num_warps)
        if tile.fits(shape) and programs >= _on(gpu, _FEWEST_PROGRAMS):
            yield tile


def _fragments_tiles(shape: MatrixShape, num_tokens: int, gpu: Gpu) -> Iterator[FragmentsTile]:
    tokens = FragmentsTile.compiled_tokens(num_tokens)
    for rows, slices in itertools.product((8, 16, 24, 32, 48, 64), (1, 2, 4)):
        tile = FragmentsTile(rows, slices, num_warps=8, held=0, registers=_FRAGMENTS_REGISTERS[tokens])
        programs = shape.out_features // rows * slices
        # There should be room for two kernels: the next one fetches its weights while this one computes.
        if (
            tile.fits(shape)
            and programs >= _on(gpu, _FEWEST_PROGRAMS)
            and tile.shared_bytes(shape, tokens, norm=True) <= gpu.shared_bytes // 2
        ):
            yield tile


def _streamed_tiles(shape: MatrixShape, num_tokens: int, gpu: Gpu) -> Iterator[StreamedTile]:
    tokens = StreamedTile.compiled_tokens(num_tokens)
    for rows, slices, shares in itertools.product((16, 32, 48, 64, 112, 128), (1, 2, 4, 8), (1, 2, 4, 8)):
        first = StreamedTile(rows, slices, shares, *STREAMED_DEPTHS[0], STREAMED_REGISTERS[tokens])
        warps, programs = first.num_warps(shape), shape.out_features // rows * slices
        if (
            warps in _STREAMED_WARPS
            and _on(gpu, _FEWEST_PROGRAMS) <= programs <= _on(gpu, _MOST_STREAMED_PROGRAMS)
            and programs * warps >= _on(gpu, _FEWEST_STREAMED_WARPS)
        ):
            yield from itertools.islice(_in_all_depths(first, shape, tokens, gpu), 1)


def _in_all_depths(tile: StreamedTile, shape: MatrixShape, tokens: int, gpu: Gpu) -> Iterator[StreamedTile]:
    for chunk, slots, ahead in STREAMED_DEPTHS:
        other = replace(tile, chunk=chunk, slots=slots, ahead=ahead)
        needed = other.shared_bytes(shape, tokens, norm=True)
        if other.fits(shape) and needed <= gpu.shared_bytes:
            yield other


def wide_tiles(shape: MatrixShape, num_tokens: int, *, gpu: Gpu) -> list[Tile]:
    """Tiles of `wide`, with as many slots as there is room for."""
    programs = {
        tile: shape.out_features // tile.rows * tile.slices
        for tile in _shallow_wide_tiles(shape, num_tokens)
        if tile.fits(shape) and _wide_bytes(tile, shape) <= gpu.shared_bytes
    }
    has_few_rows = shape.out_features <= _FEW_ROWS
    fewest = _on(gpu, _FEWEST_PROGRAMS_OF_FEW_ROWS if has_few_rows else _FEWEST_PROGRAMS)
    # The largest matrices have more programs than that anyway.
    most = max(2 * gpu.multiprocessors, min(programs.values(), default=0))
    tiles: dict[Tile, None] = {}
    for tile, count in programs.items():
        if not fewest <= count <= most:
            continue
        beside_another = wide_with_most_slots(tile, shape, room(gpu, 2))
        if beside_another:
            tiles[beside_another] = None
        if count <= gpu.multiprocessors or not beside_another:
            alone = wide_with_most_slots(tile, shape, gpu.shared_bytes)
            assert alone is not None, tile
            tiles[alone] = None
    return list(tiles)


def _shallow_wide_tiles(shape: MatrixShape, num_tokens: int) -> Iterator[WideTile]:
    """Tiles with the fewest slots; not all of them fit."""
    tokens = next(width for width in WIDTHS if num_tokens <= width)
    all_rows = (64, 128, 256) if shape.in_features >= _COLUMNS_FOR_256_ROWS else (64, 128)
    for rows, slices, columns in itertools.product(all_rows, (1, 2, 4, 8), (128, 64)):
        yield WideTile(tokens, rows // (2 if shape.gated else 1), columns, 2, 2, slices)


def separate_tiles(shape: MatrixShape, num_tokens: int, *, in_parts: bool, gpu: Gpu) -> list[Tile]:
    """Tiles of kernels that only multiply; `in_parts`: whether the result may be returned in parts."""
    return [Library(), *_skinny_tiles(shape, num_tokens, in_parts, gpu)]


def refined(tile: Tile, shape: MatrixShape, gpu: Gpu) -> list[Tile]:
    """Tiles that may be better still: other depths."""
    others: list[Tile | None] = []
    if isinstance(tile, StreamedTile):
        tokens = next(tokens for tokens, count in STREAMED_REGISTERS.items() if count == tile.registers)
        others += _in_all_depths(tile, shape, tokens, gpu)
    elif isinstance(tile, WideTile):
        is_beside_another = _wide_bytes(tile, shape) <= room(gpu, 2)
        most = room(gpu, 2) if is_beside_another else gpu.shared_bytes
        other_columns = replace(tile, columns=64 if tile.columns == 128 else 128)
        others.append(wide_with_most_slots(other_columns, shape, most))
        others.append(wide_with_most_slots(tile, shape, room(gpu, 3)))
        others.append(_with_few_tokens(tile, shape, most))
    elif isinstance(tile, SkinnyTile):
        others.append(replace(tile, num_stages=max(2, tile.num_stages // 2)))
    return [other for other in others if other is not None and other != tile]


def _with_few_tokens(tile: WideTile, shape: MatrixShape, most_bytes: int) -> WideTile | None:
    """With more slots for weights, which come from further away."""
    token_slots = max(2, -(-_FEW_TOKEN_BYTES // (tile.tokens * tile.columns * 2)))
    if token_slots >= tile.token_slots:
        return None
    steps = shape.in_features // (tile.slices * tile.columns)
    for weight_slots in range(steps, tile.weight_slots, -1):
        other = replace(tile, weight_slots=weight_slots, token_slots=token_slots)
        if other.fits(shape) and _wide_bytes(other, shape) <= most_bytes:
            return other
    return None


def _wide_bytes(tile: WideTile, shape: MatrixShape) -> int:
    return tile.shared_bytes(shape, norm=True)


def _skinny_tiles(shape: MatrixShape, num_tokens: int, in_parts: bool, gpu: Gpu) -> Iterator[SkinnyTile]:
    bases = next((bases for size, bases in _SKINNY.items() if num_tokens <= size), _SKINNY_OF_MANY)
    fewest, most = _on(gpu, _FEWEST_PROGRAMS), _on(gpu, _MOST_PROGRAMS)
    for tokens, rows, block, num_warps in bases:
        blocks = -(-num_tokens // tokens) * -(-shape.out_features // rows)
        fitting = []
        for parts in (1, 2, 4, 8) if in_parts and not shape.gated else (1,):
            is_even = shape.in_features % (parts * block) == 0 and shape.in_features >= 3 * parts * block
            if fewest <= blocks * parts <= most and (is_even or parts == 1):
                fitting.append(parts)
        if not fitting and blocks > most:
            fitting = [1]
        # One program per processor, or two.
        for parts in fitting[:2]:
            tile = SkinnyTile(tokens, rows, block, num_warps, 1, parts)
            deep = skinny_with_most_stages(tile, shape, num_tokens, gpu)
            if deep is not None:
                yield deep
