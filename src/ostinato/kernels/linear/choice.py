"""Which kernel runs a linear layer: by the shape of its matrix and the number of tokens alone.

Nothing is timed here, since nothing may be tuned while a graph is captured. The first of these that knows
the matrix at that number of tokens decides: a table given by the user (`use_table`), this package's table for
such GPUs (`tables/`, made by `ostinato tune`), the rules.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from ..cuda import compiled
from ..gpu import Gpu, gpu_of
from .rules import gemv_tile, tile_by_rule
from .tables import KernelTable, load_table
from .tiles import FOR_HOPPER, IN_CUDA, Library, MatrixShape, Tile

_FOLDER = Path(__file__).parent / "tables"
_given: KernelTable | None = None
_asks_package = True


def choose(shape: MatrixShape, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Returns the tile for a plain matrix of this shape; `Library` runs any."""
    return _found(*shape, num_tokens, dtype, device)


def choose_for(
    matrix: torch.Tensor, gated: bool, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> Tile:
    """Returns the same for a weight [rows, columns], a gated one with both halves; every launch asks."""
    rows, columns = matrix.shape
    return _found(rows // 2 if gated else rows, columns, gated, num_tokens, dtype, device)


@cache
def _found(
    out_features: int,
    in_features: int,
    gated: bool,
    num_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tile:
    shape = MatrixShape(out_features, in_features, gated)
    gpu = gpu_of(device) if device.type == "cuda" else None
    if dtype == torch.bfloat16:
        for table in (_given, package_table(gpu) if gpu and _asks_package else None):
            tile = table.find(shape, num_tokens) if table is not None else None
            if tile is not None and _runs(tile, device):
                return tile
    if gpu and dtype == torch.bfloat16:
        return tile_by_rule(shape, num_tokens, gpu, cuda=compiled.is_supported(device))
    return gemv_tile(shape, gpu) if gpu and dtype == torch.float16 and num_tokens == 1 else Library()


def _runs(tile: Tile, device: torch.device) -> bool:
    """Tells whether a GPU has the instructions."""
    if isinstance(tile, FOR_HOPPER):
        return compiled.has_warpgroup_products(device)
    return not isinstance(tile, IN_CUDA) or compiled.is_supported(device)


def fallbacks(device: torch.device) -> list[str]:
    """Returns which of this package's kernels, or of the table in use, do not run on a GPU, and why."""
    gpu, told = gpu_of(device), []
    if (reason := compiled.why_unsupported(device)) is not None:
        told.append(reason)
    tiles = [choice.tile for choices in _given.choices.values() for choice in choices] if _given else []
    if left_out := sum(not _runs(tile, device) for tile in tiles):
        told.append(f"{left_out} of {len(tiles)} choices of the table do not run on {gpu}: rules decide")
    return told


# For torch.compile: what `torch.compiler.assume_constant_result` does, without importing all of dynamo.
_found.__wrapped__._dynamo_marked_constant = True  # type: ignore[attr-defined]


def use_table(table: KernelTable | None, *, package: bool = True) -> None:
    """Let this table decide first, in this process; None: no table of a user.

    `package`: whether the package's table decides next, or the rules do. Graphs captured before keep what
    they were captured with.
    """
    global _given, _asks_package
    _given, _asks_package = table, package
    _found.cache_clear()


@contextmanager
def using(table: KernelTable | None, *, package: bool = True) -> Iterator[None]:
    """`use_table` for a while."""
    before = _given, _asks_package
    use_table(table, package=package)
    try:
        yield
    finally:
        use_table(before[0], package=before[1])


def table_name(gpu: Gpu) -> str:
    """Returns the file name of tables for such GPUs."""
    return f"{gpu}.json"


@cache
def package_table(gpu: Gpu) -> KernelTable | None:
    """Returns the committed table for such GPUs, if there is one."""
    file = _FOLDER / table_name(gpu)
    return load_table(file) if file.is_file() else None
