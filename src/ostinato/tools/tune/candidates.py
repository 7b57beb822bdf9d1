"""The tiles that a matrix tries at a number of tokens.

First a few of every kind, then what differs from the best of them in one respect: trying all combinations
would take an hour of compiling.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ostinato.kernels.linear import cuda_fragments, cuda_streamed, cuda_wide
from ostinato.kernels.linear.tiles import (
    MOST_REGISTERS,
    MOST_TOKENS,
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

# Tokens, rows, columns at a time and warps of a skinny program, by the most tokens of a step.
_SKINNY = {
    16: [(16, 64, 128, 4), (16, 64, 64, 4), (16, 32, 256, 4), (16, 32, 128, 4), (16, 128, 64, 8)],
    32: [(32, 64, 128, 4), (32, 64, 64, 4), (32, 32, 128, 4), (32, 128, 64, 8)],
    64: [(64, 64, 128, 4), (64, 64, 64, 4), (64, 32, 128, 4), (64, 32, 64, 4), (64, 128, 64, 8)],
}
_SKINNY_OF_MANY = [
    *((64, 64, 128, 4), (64, 64, 64, 4), (64, 32, 128, 4), (64, 128, 64, 8)),
    *((128, 64, 64, 8), (128, 64, 128, 8), (128, 128, 64, 8), (128, 32, 64, 4)),
]
_FEWEST_PROGRAMS, _MOST_PROGRAMS = 96, 640
_MULTIPROCESSORS = 132
"""Of an H100 or H200."""
_MOST_PREFETCHED_BYTES = 40 << 20
"""Larger matrices stream at the memory's speed by themselves, and would push each other out of L2."""
_GEMV_REGISTERS = 48
"""Of a thread of `cuda_gemv`, beside those that hold its weights and its columns of the token."""
_FRAGMENTS_REGISTERS = {8: 88, 16: 128, 32: 168}
"""By the tokens of a pass."""
_STREAMED_REGISTERS = {8: 64, 16: 96, 32: 112}
_STREAMED_WARPS = range(3, 17)
"""Of a program of `streamed`."""
_FEWEST_STREAMED_WARPS, _MOST_STREAMED_PROGRAMS = 1024, 1024
"""Of all programs together: so many must be on their way to keep the memory busy."""
_STREAMED_DEPTHS = [(128, 3, 8), (256, 2, 8), (128, 3, 6), (128, 2, 4), (128, 4, 12)]
"""Columns, chunks and steps ahead."""
_WIDE_TOKENS = (16, 32, 64, 128, 192, 256)
"""Of a program of `wide`."""
_FEWER_WIDE_TOKENS = {128: 64, 192: 128, 256: 128}
"""In more programs, each with more room for weights."""
_FEWEST_TOKENS_OF_PEERS = 64
_COLUMNS_FOR_256_ROWS = 4096
"""At least: matrices of smaller models would have too few such programs."""
_FEW_ROWS, _FEWEST_PROGRAMS_OF_FEW_ROWS = 4096, 60
_MOST_WIDE_PROGRAMS = 2 * _MULTIPROCESSORS
_MOST_WIDE_COLUMNS = 768
"""That are there or on their way, where there are as many slots of tokens as of weights."""
_FEW_TOKEN_BYTES = 32 << 10
_RESERVED_BYTES = 1 << 10
"""Of a multiprocessor's shared memory, for each program beside what the program asks for."""


def fused_tiles(shape: MatrixShape, num_tokens: int, *, cuda: bool, shared_bytes: int) -> list[Tile]:
    """Of kernels with norm, gate and residual inside; `cuda`: whether those in CUDA C++ run here."""
    tiles: list[Tile] = []
    if num_tokens == 1:
        tiles += [
            GemvTile(rows, block, num_warps)
            for rows, block, num_warps in itertools.product((1, 2, 4, 8), (1024, 2048, 4096), (4, 8))
            if 4096 <= rows * block <= 16384
        ]
        if cuda:
            tiles += _cuda_gemv_tiles(shape)
    if cuda and num_tokens <= MOST_TOKENS[FragmentsTile]:
        tiles += _fragments_tiles(shape, num_tokens, shared_bytes)
    if cuda and 1 < num_tokens <= MOST_TOKENS[StreamedTile]:
        tiles += _streamed_tiles(shape, num_tokens, shared_bytes)
    return tiles


def _cuda_gemv_tiles(shape: MatrixShape) -> Iterator[CudaGemvTile]:
    for rows, num_warps in itertools.product((1, 2, 3, 4, 6), (2, 4, 8)):
        tile = CudaGemvTile(rows, num_warps, registers=0)
        wanted = -(-(tile.held(shape) + shape.in_features // 64 + _GEMV_REGISTERS) // 8) * 8
        tile = replace(tile, registers=min(wanted, MOST_REGISTERS))
        if tile.fits(shape) and shape.out_features // (rows * num_warps) >= _FEWEST_PROGRAMS:
            yield tile


def _fragments_tiles(shape: MatrixShape, num_tokens: int, shared_bytes: int) -> Iterator[FragmentsTile]:
    for rows, slices in itertools.product((8, 16, 24, 32, 48, 64), (1, 2, 4)):
        tile = FragmentsTile(rows, slices, num_warps=8, held=0, registers=MOST_REGISTERS)
        tokens = tile.tokens_at_a_time(num_tokens)
        tile = replace(tile, registers=_FRAGMENTS_REGISTERS[tokens])
        programs = shape.out_features // rows * slices
        # Two kernels should find room at a time: the next one fetches its weights while this one computes.
        if (
            tile.fits(shape)
            and programs >= _FEWEST_PROGRAMS
            and cuda_fragments.shared_bytes(tile, shape, tokens, norm=True) <= shared_bytes // 2
        ):
            yield tile


def _streamed_tiles(shape: MatrixShape, num_tokens: int, shared_bytes: int) -> Iterator[StreamedTile]:
    chunk, slots, ahead = _STREAMED_DEPTHS[0]
    for rows, slices, shares in itertools.product((16, 32, 48, 64, 112, 128), (1, 2, 4, 8), (1, 2, 4, 8)):
        tile = StreamedTile(rows, slices, shares, chunk, slots, ahead, MOST_REGISTERS)
        tokens, warps = tile.tokens_at_a_time(num_tokens), tile.num_warps(shape)
        programs = shape.out_features // rows * slices
        tile = replace(tile, registers=_STREAMED_REGISTERS[tokens])
        if (
            tile.fits(shape)
            and warps in _STREAMED_WARPS
            and _FEWEST_PROGRAMS <= programs <= _MOST_STREAMED_PROGRAMS
            and programs * warps >= _FEWEST_STREAMED_WARPS
            and cuda_streamed.shared_bytes(tile, shape, tokens, norm=True) <= shared_bytes
        ):
            yield tile


def wide_tiles(shape: MatrixShape, num_tokens: int, *, shared_bytes: int) -> list[Tile]:
    """Of `wide`, with as many slots as there is room for."""
    programs = {
        tile: shape.out_features // tile.rows * tile.slices * -(-num_tokens // tile.tokens)
        for tile in _shallow_wide_tiles(shape, num_tokens)
        if tile.fits(shape) and _wide_bytes(tile, shape) <= shared_bytes
    }
    fewest = _FEWEST_PROGRAMS_OF_FEW_ROWS if shape.out_features <= _FEW_ROWS else _FEWEST_PROGRAMS
    # The largest matrices have more programs than that in any case.
    most = max(_MOST_WIDE_PROGRAMS, min(programs.values(), default=0))
    tiles: dict[Tile, None] = {}
    for tile, count in programs.items():
        if not fewest <= count <= most:
            continue
        beside_another = _with_most_slots(tile, shape, _room(shared_bytes, 2))
        if beside_another:
            tiles[beside_another] = None
        if count <= _MULTIPROCESSORS or not beside_another:
            alone = _with_most_slots(tile, shape, shared_bytes)
            assert alone is not None, tile
            tiles[alone] = None
    return list(tiles)


def _shallow_wide_tiles(shape: MatrixShape, num_tokens: int) -> Iterator[WideTile]:
    """With the fewest slots; not all of them fit."""
    width = next((width for width in _WIDE_TOKENS if num_tokens <= width), _WIDE_TOKENS[-1])
    all_tokens = dict.fromkeys((width, _FEWER_WIDE_TOKENS.get(width, width)))
    all_rows = (64, 128, 256) if shape.in_features >= _COLUMNS_FOR_256_ROWS else (64, 128)
    all_columns = (128, 64) if num_tokens <= 64 else (64,)
    for tokens, rows, slices, columns in itertools.product(all_tokens, all_rows, (1, 2, 4, 8), all_columns):
        yield WideTile(tokens, rows // (2 if shape.gated else 1), columns, 2, 2, slices)


def separate_tiles(shape: MatrixShape, num_tokens: int, *, in_parts: bool, shared_bytes: int) -> list[Tile]:
    """Of kernels that multiply and nothing else; `in_parts`: whether parts of the result are welcome."""
    return [Library(), *_skinny_tiles(shape, num_tokens, in_parts, shared_bytes)]


def refined(tile: Tile, shape: MatrixShape, shared_bytes: int) -> list[Tile]:
    """What may be better still: other depths, weights fetched before the wait, tokens fetched together."""
    if isinstance(tile, StreamedTile):
        return list(_streamed_otherwise(tile, shape, shared_bytes))
    if isinstance(tile, WideTile):
        return list(_wide_otherwise(tile, shape, shared_bytes))
    if not isinstance(tile, SkinnyTile):
        return []
    columns = shape.in_features // tile.parts
    shallow = replace(tile, num_stages=max(2, tile.num_stages // 2))
    earlier = [
        replace(base, early=early)
        for base, early in itertools.product((tile, shallow), (tile.block, 2 * tile.block))
        if 2 * early <= columns
    ]
    weight_bytes = shape.out_features * shape.in_features * 2 * (2 if shape.gated else 1)
    prefetching = [replace(tile, prefetch=True)] if weight_bytes <= _MOST_PREFETCHED_BYTES else []
    more = [shallow, *prefetching, *earlier]
    return [other for other in more if other != tile and _shared_bytes(other, shape) <= shared_bytes]


def _streamed_otherwise(tile: StreamedTile, shape: MatrixShape, shared_bytes: int) -> Iterator[StreamedTile]:
    tokens = next(tokens for tokens, count in _STREAMED_REGISTERS.items() if count == tile.registers)
    for chunk, slots, ahead in _STREAMED_DEPTHS:
        other = replace(tile, chunk=chunk, slots=slots, ahead=ahead)
        if (
            other != tile
            and other.fits(shape)
            and cuda_streamed.shared_bytes(other, shape, tokens, norm=True) <= shared_bytes
        ):
            yield other


def _wide_otherwise(tile: WideTile, shape: MatrixShape, shared_bytes: int) -> Iterator[WideTile]:
    half = _room(shared_bytes, 2)
    room = half if _wide_bytes(tile, shape) <= half else shared_bytes
    others = [
        _with_most_slots(replace(tile, columns=64 if tile.columns == 128 else 128), shape, room),
        _with_most_slots(tile, shape, _room(shared_bytes, 3)),
        _with_few_tokens(tile, shape, room),
    ]
    if tile.tokens >= _FEWEST_TOKENS_OF_PEERS:
        others.append(replace(tile, peers=2))
    for other in others:
        if other is not None and other != tile and other.fits(shape):
            yield other


def _with_most_slots(tile: WideTile, shape: MatrixShape, room: int) -> WideTile | None:
    """As many for weights as for tokens."""
    for slots in range(min(_wide_steps(tile, shape), _MOST_WIDE_COLUMNS // tile.columns), 1, -1):
        other = replace(tile, weight_slots=slots, token_slots=slots)
        if other.fits(shape) and _wide_bytes(other, shape) <= room:
            return other
    return None


def _with_few_tokens(tile: WideTile, shape: MatrixShape, room: int) -> WideTile | None:
    """More slots for weights, which come from further away."""
    token_slots = max(2, -(-_FEW_TOKEN_BYTES // (tile.tokens * tile.columns * 2)))
    if token_slots >= tile.token_slots:
        return None
    for weight_slots in range(_wide_steps(tile, shape), tile.weight_slots, -1):
        other = replace(tile, weight_slots=weight_slots, token_slots=token_slots)
        if other.fits(shape) and _wide_bytes(other, shape) <= room:
            return other
    return None


def _wide_steps(tile: WideTile, shape: MatrixShape) -> int:
    return shape.in_features // (tile.slices * tile.columns)


def _wide_bytes(tile: WideTile, shape: MatrixShape) -> int:
    return cuda_wide.shared_bytes(tile, shape, scaled=True)


def _room(shared_bytes: int, beside: int) -> int:
    """For each of so many programs of a multiprocessor, where one alone can have `shared_bytes`."""
    return (shared_bytes + _RESERVED_BYTES) // beside - _RESERVED_BYTES


def _skinny_tiles(
    shape: MatrixShape, num_tokens: int, in_parts: bool, shared_bytes: int
) -> Iterator[SkinnyTile]:
    bases = next((bases for size, bases in _SKINNY.items() if num_tokens <= size), _SKINNY_OF_MANY)
    for tokens, rows, block, num_warps in bases:
        blocks = -(-num_tokens // tokens) * -(-shape.out_features // rows)
        fitting = []
        for parts in (1, 2, 4, 8) if in_parts and not shape.gated else (1,):
            is_even = shape.in_features % (parts * block) == 0 and shape.in_features >= 3 * parts * block
            if _FEWEST_PROGRAMS <= blocks * parts <= _MOST_PROGRAMS and (is_even or parts == 1):
                fitting.append(parts)
        if not fitting and blocks > _MOST_PROGRAMS:
            fitting = [1]
        # One program a processor, or two.
        for parts in fitting[:2]:
            room = shared_bytes // (1 if blocks * parts <= _MULTIPROCESSORS else 2) - (2 << 10)
            tile = SkinnyTile(tokens, rows, block, num_warps, 1, parts)
            stages = min(room // _shared_bytes(tile, shape), 6, shape.in_features // parts // block)
            if stages >= 2:
                yield replace(tile, num_stages=stages)


def _shared_bytes(tile: SkinnyTile, shape: MatrixShape) -> int:
    rows = tile.rows * (2 if shape.gated else 1)
    staged = tile.num_stages * tile.block * (rows + tile.tokens) * 2
    return staged + tile.early * (rows + tile.tokens) * 2
