"""Find the tiles of linear layers for a model on this GPU, by timing all its layers in captured graphs.

python benchmarks/tune_tiles.py benchmarks/models/llama-3.2-1b 1,8,32,128

For each number of tokens, each matrix tries its candidates in turn while the others stay as they are; what
wins is printed as entries for `src/ostinato/kernels/linear/tiles.py`. None means cuBLAS. Two rounds, since
what one kernel leaves free decides how early the next can start.
"""

import itertools
import sys
from pathlib import Path

import torch

from kernels import Step, microseconds
from ostinato.kernels.compile_ahead import compiling_only
from ostinato.kernels.linear import tiles
from ostinato.kernels.linear.tiles import GemvTile, MatrixShape, SkinnyTile
from ostinato.models.weights import load_model

GEMV = [
    GemvTile(rows, block, warps)
    for rows, block, warps in itertools.product((1, 2, 4, 8), (1024, 2048, 4096), (4, 8))
    if 4096 <= rows * block <= 16384
]
SKINNY = {
    16: [(16, 16, 256, 2, 4), (16, 32, 128, 4, 4), (16, 32, 256, 4, 3), (16, 64, 128, 4, 4)],
    64: [(64, 16, 128, 4, 5), (64, 16, 256, 4, 3), (64, 32, 128, 4, 4), (64, 64, 64, 4, 5)],
    128: [(64, 16, 256, 4, 3), (64, 32, 128, 4, 4), (128, 64, 64, 4, 4), (128, 128, 64, 8, 4)],
}
LAYERS = 8
ROUNDS = 2

Tile = GemvTile | SkinnyTile | None


def choose(shape: MatrixShape, num_tokens: int, tile: Tile) -> None:
    """Let the matrix run with this tile from now on."""
    if isinstance(tile, GemvTile):
        tiles._GEMV[shape] = tile
        return
    limit = next(limit for limit in tiles.SKINNY_TOKENS if num_tokens <= limit)
    entries = tiles._SKINNY.setdefault(shape, {})
    entries.pop(limit, None)
    if tile is not None:
        entries[limit] = tile


def candidates(num_tokens: int) -> list[Tile]:
    """What a matrix may try."""
    if num_tokens == 1:
        return list(GEMV)
    limit = next(limit for limit in tiles.SKINNY_TOKENS if num_tokens <= limit)
    return [None, *(SkinnyTile(*values) for values in SKINNY[limit])]


def present(shape: MatrixShape, num_tokens: int) -> Tile:
    """What it runs with now."""
    return tiles.gemv_tile(shape) if num_tokens == 1 else tiles.skinny_tile(shape, num_tokens)


def tune(step: Step, shapes: list[MatrixShape], num_tokens: int) -> None:
    """Coordinate descent over the matrices of a layer."""
    run = step.whole()
    with compiling_only(torch.device("cuda", torch.cuda.current_device())):
        for shape in shapes:
            before = present(shape, num_tokens)
            for tile in candidates(num_tokens):
                choose(shape, num_tokens, tile)
                run()
            choose(shape, num_tokens, before)
    best = microseconds(run)
    print(f"{num_tokens} tokens: {best / len(step.layers):.2f} us a layer", flush=True)
    for _ in range(ROUNDS):
        for shape in shapes:
            kept = present(shape, num_tokens)
            for tile in candidates(num_tokens):
                choose(shape, num_tokens, tile)
                us = microseconds(run)
                if us < best * 0.997:
                    best, kept = us, tile
            choose(shape, num_tokens, kept)
    print(f"{num_tokens} tokens: {best / len(step.layers):.2f} us a layer with")
    for shape in shapes:
        print(f"    {shape}: {present(shape, num_tokens)}", flush=True)


@torch.no_grad()
def main(folder: Path, batch_sizes: list[int]) -> None:
    """Tune for each number of tokens in the general form of a step (`resident` tiles stay as they are)."""
    model = load_model(folder, device="cuda", dtype=torch.bfloat16, load_format="dummy")
    model.most_few_tokens = 1
    for num_tokens in batch_sizes:
        step = Step(model, num_tokens)
        step.layers = step.layers[:LAYERS]
        tune(step, list(model.matrix_shapes), num_tokens)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(size) for size in sys.argv[2].split(",")])
