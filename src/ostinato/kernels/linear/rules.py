"""The kernel of a matrix that no table knows, by rules taken from the tables of those that were measured.

What a CTA gets follows from how many CTAs the GPU has room for at a time:

    tokens        1                2 to 16                    17 to 64       65 to 256
    small matrix  cuda_gemv        fragments                  wide           skinny
    large matrix  gemv             streamed                   wide           cuBLAS, skinny if gated
    the head      gemv             skinny                     skinny         cuBLAS

Small is what fits on the chip together with its neighbour. Above that is cuBLAS, and from 4,096 tokens on
`prompt` for what is gated and for what makes rows no longer. This is for Hopper, where it was measured:
elsewhere one token runs `gemv` and the rest cuBLAS. How far the rules are from the tables: docs/kernels.md.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from ..gpu import H200, Gpu
from ..host_sizes import cdiv, next_power_of_2
from ..registry import PLAIN, Rule, formats_of, register, rule_for
from . import cuda_prompt
from .tiles import (
    MOST_REGISTERS,
    MOST_TOKENS,
    WIDTHS,
    CudaGemvTile,
    FragmentsTile,
    GemvTile,
    Library,
    MatrixShape,
    PromptTile,
    SkinnyTile,
    StreamedTile,
    Tile,
    WideTile,
)

HOPPER = (9, 0)
_MOST_SKINNY_TOKENS = 256
FEWEST_PROMPT_TOKENS = 4096
"""Of `prompt`: the largest step of an engine by default, and where it was measured to win."""
_SMALL_BYTES = 120 << 10
"""For each SM: a matrix of so many, and what is fetched of the next one, fit on the chip."""
_ROWS_OF_A_HEAD = 1 << 15
"""At least: no other matrix of a model has so many."""
_GEMV_BLOCKS = (4096, 2048, 1024, 512)
_MOST_WASTE = 0.07
"""Of the lanes of a GEMV, where columns are no multiple of what it takes at a time."""
_GEMV_ELEMENTS = 8192
"""Of a CTA: 64 for each thread."""
_OTHER_GEMV_REGISTERS = 48
"""Of a thread of `cuda_gemv`, beside those that hold its weights and its columns of the token."""
_HELD, _HELD_OF_SMALL = 128, 192
"""Registers that hold weights: a small matrix is asked for at once, of a large one more CTAs follow."""
_FRAGMENTS_COLUMNS = 1024
"""Every CTA reads its columns of all tokens: a matrix that has more must be half as small."""
STREAMED_REGISTERS = {8: 64, 16: 96}
"""By the tokens that it is compiled for."""
_STREAMED_WARPS, _STREAMED_COLUMNS = 9.5, 256
"""For each SM, at least, and of a warp, at least."""
STREAMED_DEPTHS = [(128, 3, 8), (256, 2, 8), (128, 3, 6), (128, 2, 4), (128, 4, 12), (64, 5, 8), (64, 3, 4)]
"""Columns, chunks and steps ahead."""
_MOST_WIDE_COLUMNS = 768
"""That are there or on their way, where there are as many slots of tokens as of weights."""
_RESERVED_BYTES = 1 << 10
"""Of a SM's shared memory, for each CTA beside what the CTA asks for."""


def tile_by_rule(shape: MatrixShape, num_tokens: int, gpu: Gpu, *, cuda: bool, format: str = PLAIN) -> Tile:
    """Returns the tile of a matrix in bfloat16, or in a format; `cuda`: kernels in CUDA C++ run there."""
    tile: Tile = rule_for("linear", format, gpu).choose(shape, num_tokens, gpu, cuda=cuda)
    return tile


def weight_formats() -> list[str]:
    """Returns the formats of weights for which there are rules."""
    return formats_of("linear")


def _on_hopper(shape: MatrixShape, num_tokens: int, gpu: Gpu, *, cuda: bool) -> Tile:
    if num_tokens == 1:
        return (_cuda_gemv(shape, gpu) if cuda else None) or gemv_tile(shape, gpu)
    is_head = shape.out_features >= _ROWS_OF_A_HEAD and not shape.gated
    tile: Tile | None = None
    if cuda and not is_head:
        if num_tokens <= MOST_TOKENS[StreamedTile]:
            tokens = StreamedTile.compiled_tokens(num_tokens)
            tile = _fragments(shape, tokens, gpu) or _streamed(shape, tokens, gpu)
        elif num_tokens <= MOST_TOKENS[WideTile]:
            tile = _wide(shape, next(width for width in WIDTHS[1:] if num_tokens <= width), gpu)
        elif num_tokens >= FEWEST_PROMPT_TOKENS:
            tile = _prompt(shape, num_tokens, gpu)
    return tile or _skinny(shape, num_tokens, gpu, is_head) or Library()


def _elsewhere(shape: MatrixShape, num_tokens: int, gpu: Gpu, *, cuda: bool) -> Tile:
    return gemv_tile(shape, gpu) if num_tokens == 1 else Library()


_ADVICE = "; cuBLAS runs two and more tokens of a matrix in no table (`ostinato tune` makes one)"
register(Rule("linear", PLAIN, HOPPER, _on_hopper, (H200,), "; `ostinato tune` measures them"))
register(Rule("linear", PLAIN, None, _elsewhere, (H200,), _ADVICE))


def _prompt(shape: MatrixShape, num_tokens: int, gpu: Gpu) -> PromptTile | None:
    """Chooses `prompt` for matrices that are gated or make rows no longer, if few SMs stay idle."""
    tile = PromptTile()
    programs = cuda_prompt.num_programs(num_tokens, shape.out_features, gated=shape.gated)
    wins = shape.gated or shape.out_features <= shape.in_features
    return tile if wins and tile.fits(shape) and 4 * programs >= 3 * gpu.multiprocessors else None


def weight_bytes(shape: MatrixShape) -> int:
    """Returns the size of the whole matrix."""
    return shape.out_features * shape.in_features * 2 * _halves(shape)


def _halves(shape: MatrixShape) -> int:
    return 2 if shape.gated else 1


def _is_small(shape: MatrixShape, gpu: Gpu, share: float = 1) -> bool:
    return weight_bytes(shape) <= share * _SMALL_BYTES * gpu.multiprocessors


def gemv_tile(shape: MatrixShape, gpu: Gpu) -> GemvTile:
    """Returns the tile of `triton_gemv`: whole rows if few lanes stay idle, else as many columns as do."""

    def waste(block: int) -> float:
        return cdiv(shape.in_features, block) * block / shape.in_features - 1

    whole = next_power_of_2(shape.in_features)
    blocks = [block for block in _GEMV_BLOCKS if block < whole]
    blocks = [whole, *blocks] if whole <= _GEMV_BLOCKS[0] else blocks
    block = next((block for block in blocks if waste(block) <= _MOST_WASTE), min(blocks, key=waste))
    rows = max(1, _GEMV_ELEMENTS // (block * _halves(shape)))
    while rows > 1 and cdiv(shape.out_features, rows) < 3 * gpu.multiprocessors:
        rows //= 2
    return GemvTile(rows, block, num_warps=4)


def cuda_gemv_tile(shape: MatrixShape, rows: int, num_warps: int) -> CudaGemvTile:
    """With as many registers as it can use; it may not fit."""
    tile = CudaGemvTile(rows, num_warps, registers=0)
    wanted = tile.held(shape) + shape.in_features // 64 + _OTHER_GEMV_REGISTERS
    return replace(tile, registers=min(cdiv(wanted, 8) * 8, MOST_REGISTERS))


def _cuda_gemv(shape: MatrixShape, gpu: Gpu) -> CudaGemvTile | None:
    """For what is on the chip at once, and for rows that a GEMV in Triton leaves lanes idle with."""
    is_even = next_power_of_2(shape.in_features) == shape.in_features
    is_head = shape.out_features >= _ROWS_OF_A_HEAD
    if _is_small(shape, gpu):
        most, wins = _HELD_OF_SMALL, not is_even or shape.gated or shape.out_features > shape.in_features
    else:
        most, wins = _HELD, not (is_even or is_head or shape.gated or shape.in_features > _GEMV_BLOCKS[0])
    for rows in (4, 3, 2, 1) if wins else ():
        tile = cuda_gemv_tile(shape, rows, num_warps=2)
        programs = shape.out_features // (2 * rows)
        if tile.fits(shape) and tile.held(shape) <= most and 4 * programs >= 3 * gpu.multiprocessors:
            return tile
    return None


@cache
def _fragments(shape: MatrixShape, tokens: int, gpu: Gpu) -> FragmentsTile | None:
    """A CTA for each SM, with many rows, so that few read the same columns of the tokens."""
    is_long = shape.in_features > _FRAGMENTS_COLUMNS
    if not _is_small(shape, gpu, share=0.5 if is_long else 1):
        return None
    found: dict[FragmentsTile, int] = {}
    for rows, slices, num_warps in product((64, 48, 32, 24, 16), (1, 2, 4, 8), (8, 4)):
        tile = FragmentsTile(rows, slices, num_warps, min(4, rows * _halves(shape) // 8), 128)
        if num_warps == 4 and tokens == 16:
            tile = replace(tile, registers=160)
        programs = shape.out_features // rows * slices
        if (
            tile.fits(shape)
            and gpu.multiprocessors <= 2 * programs <= 2 * gpu.multiprocessors
            and tile.shared_bytes(shape, tokens, norm=True) <= 0.6 * gpu.shared_bytes
        ):
            found[tile] = programs
    return max(found, key=lambda tile: found[tile], default=None)


@cache
def _streamed(shape: MatrixShape, tokens: int, gpu: Gpu) -> StreamedTile | None:
    """Warps enough to keep the memory busy, each with columns enough to be worth its start."""
    tiles, ways = cdiv(shape.out_features, 8 if shape.gated else 16), 1
    while tiles * ways < _STREAMED_WARPS * gpu.multiprocessors:
        ways *= 2
    while ways > 1:
        if shape.in_features >= ways * _STREAMED_COLUMNS and shape.in_features % (ways * 64) == 0:
            break
        ways //= 2
    return next(_streamed_in(shape, tokens, gpu, ways), None)


def _streamed_in(shape: MatrixShape, tokens: int, gpu: Gpu, ways: int) -> Iterator[StreamedTile]:
    """Tiles whose columns are shared in so many ways: by CTAs, where rows are few, else by warps."""
    if shape.gated or shape.in_features >= shape.out_features:
        slices = min(ways, 8)
    else:  # with more tokens to read, CTAs have more rows and fewer columns
        slices = 1 if tokens == 8 else max(1, ways // 2)
    shares = ways // slices
    few_rows = 32 if shape.gated and tokens == 8 else 64
    best_rows = 128 // shares if slices == 1 and not shape.gated else few_rows
    depths = sorted(STREAMED_DEPTHS, key=lambda depth: depth[2] != (12 if ways == 1 else 8))
    all_rows = (best_rows, 48, 32, 16, 128)
    # As many beside each other as there are of a SM, as far as there is room.
    for rows, beside, (chunk, slots, ahead) in product(all_rows, (4, 3, 2, 1), depths):
        tile = StreamedTile(rows, slices, shares, chunk, slots, ahead, STREAMED_REGISTERS[tokens])
        programs = shape.out_features // rows * slices
        if (
            tile.fits(shape)
            and beside <= cdiv(programs, gpu.multiprocessors)
            and tile.num_warps(shape) in range(4, 17)
            and 4 * programs >= 3 * gpu.multiprocessors
            and tile.shared_bytes(shape, tokens, norm=True) <= room(gpu, beside)
        ):
            yield tile


@cache
def _wide(shape: MatrixShape, tokens: int, gpu: Gpu) -> WideTile | None:
    """A CTA for each SM; rather some with two than half of them with none."""
    found: dict[WideTile, tuple[float, ...]] = {}
    is_deep = shape.out_features > shape.in_features >= 2048 or shape.in_features > 8192
    for all_rows, slices in product((64, 128, 256), (1, 2, 4, 8)):
        rows = all_rows // _halves(shape)
        fill = shape.out_features // rows * slices / gpu.multiprocessors
        is_largest = all_rows == 256 and slices == 1
        if fill < 0.45 or (fill > 2 and not is_largest):
            continue
        most = room(gpu, 1 if is_deep and fill <= 1 else 2)
        tile = _wide_in(WideTile(tokens, rows, 128, 2, 2, slices), shape, most)
        if tile is not None:
            order = 0 if 0.7 <= fill <= 1 else 1 if fill > 1 else 2
            found[tile] = (order, -fill if fill <= 1 else fill, slices)
    return min(found, key=lambda tile: found[tile], default=None)


def _wide_in(tile: WideTile, shape: MatrixShape, most: int) -> WideTile | None:
    """128 columns at a time, unless few fit, or there are few."""
    long = wide_with_most_slots(tile, shape, most)
    short = wide_with_most_slots(replace(tile, columns=64), shape, most)
    if long is None or short is None:
        return long or short
    is_enough = long.weight_slots >= 4 or 3 * 128 <= long.weight_slots * 128 >= short.weight_slots * 64
    return long if is_enough else short


def wide_with_most_slots(tile: WideTile, shape: MatrixShape, room: int) -> WideTile | None:
    """Returns the tile with most slots, as many for weights as for tokens; None if two do not fit."""
    steps = shape.in_features // (tile.slices * tile.columns)
    for slots in range(min(steps, _MOST_WIDE_COLUMNS // tile.columns), 1, -1):
        other = replace(tile, weight_slots=slots, token_slots=slots)
        if other.fits(shape) and other.shared_bytes(shape, norm=True) <= room:
            return other
    return None


def _skinny(shape: MatrixShape, num_tokens: int, gpu: Gpu, is_head: bool) -> SkinnyTile | None:
    if is_head or num_tokens <= 64:
        return _skinny_of_few(shape, num_tokens, gpu) if num_tokens <= 64 else None
    if num_tokens > _MOST_SKINNY_TOKENS or not (shape.gated or _is_small(shape, gpu)):
        return None
    few = [(64, 32, 4)] if num_tokens <= 128 else []
    for tokens, rows, num_warps in (*few, (64, 64, 4), (128, 64, 8), (128, 128, 8)):
        blocks = cdiv(num_tokens, tokens) * cdiv(shape.out_features, rows)
        parts = _most_parts(shape, blocks, gpu)
        if 2 * blocks * parts >= gpu.multiprocessors >= blocks * parts:
            block = 128 if parts > 1 else 64
            tile = SkinnyTile(tokens, rows, block, num_warps, 1, parts)
            return skinny_with_most_stages(tile, shape, num_tokens, gpu)
    return None


def _skinny_of_few(shape: MatrixShape, num_tokens: int, gpu: Gpu) -> SkinnyTile | None:
    """64 rows, 128 columns at a time, and as many parts as make a CTA for each SM."""
    tokens = next(size for size in (16, 32, 64) if num_tokens <= size)
    block = 64 if shape.gated and tokens > 16 else 128
    parts = _most_parts(shape, cdiv(shape.out_features, 64), gpu)
    tile = SkinnyTile(tokens, 64, block, 4, 1, parts)
    return skinny_with_most_stages(tile, shape, num_tokens, gpu)


def _most_parts(shape: MatrixShape, blocks: int, gpu: Gpu) -> int:
    """Returns the most split-K parts for so many blocks of rows; only what is added to something has any."""
    parts = 1
    while (
        not shape.gated
        and shape.in_features >= shape.out_features
        and 2 * parts * blocks <= gpu.multiprocessors
        and shape.in_features % (2 * parts * 128) == 0
        and shape.in_features >= 6 * parts * 128
    ):
        parts *= 2
    return parts


def skinny_with_most_stages(
    tile: SkinnyTile, shape: MatrixShape, num_tokens: int, gpu: Gpu
) -> SkinnyTile | None:
    """For one CTA of a SM or, where there are more, two; None if two stages do not fit."""
    programs = cdiv(num_tokens, tile.tokens) * cdiv(shape.out_features, tile.rows) * tile.parts
    most_bytes = gpu.shared_bytes // (1 if programs <= gpu.multiprocessors else 2) - 2 * _RESERVED_BYTES
    most = min(most_bytes // skinny_bytes(tile, shape), 6, shape.in_features // tile.parts // tile.block)
    return replace(tile, num_stages=most) if most >= 2 else None


def skinny_bytes(tile: SkinnyTile, shape: MatrixShape) -> int:
    """Returns the shared memory of a CTA."""
    return tile.num_stages * tile.block * (tile.rows * _halves(shape) + tile.tokens) * 2


def room(gpu: Gpu, beside: int) -> int:
    """Shared memory for each of so many CTAs of a SM."""
    return (gpu.shared_bytes + _RESERVED_BYTES) // beside - _RESERVED_BYTES
