"""Which kernel runs a linear layer: by the shape of its matrix and the number of tokens alone.

Nothing is timed here, since nothing may be tuned while a graph is captured. The first of these that knows
the matrix at that number of tokens decides: a table given by the user (`use_table`), this package's table for
the GPU (`tables/`, made by `ostinato tune`), a rule.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from ..cuda import compiled
from .kernel_table import KernelTable
from .table_file import load_table
from .tiles import IN_CUDA, Library, MatrixShape, Tile, WideTile, default_gemv_tile

_FOLDER = Path(__file__).parent / "tables"
_LIBRARY = Library()
_given: KernelTable | None = None


def choose(shape: MatrixShape, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """What runs a matrix of this shape; `library` is what runs any."""
    return _found(*shape, num_tokens, dtype, device)


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
    if dtype == torch.bfloat16:
        for table in (_given, _table_of_package(device)):
            tile = table.find(shape, num_tokens) if table is not None else None
            if tile is not None and _runs(tile, device):
                return tile
    if num_tokens == 1 and dtype in (torch.bfloat16, torch.float16):
        return default_gemv_tile(shape)
    return _LIBRARY


def _runs(tile: Tile, device: torch.device) -> bool:
    """Whether a GPU has the instructions."""
    if isinstance(tile, WideTile):
        return compiled.has_warpgroup_products(device)
    return not isinstance(tile, IN_CUDA) or compiled.is_supported(device)


# For torch.compile: what `torch.compiler.assume_constant_result` does, without importing all of dynamo.
_found.__wrapped__._dynamo_marked_constant = True  # type: ignore[attr-defined]


def use_table(table: KernelTable | None) -> None:
    """Let this table decide before those of the package, in this process; None: no table of a user.

    Graphs captured before keep what they were captured with.
    """
    global _given
    _given = table
    _found.cache_clear()


@contextmanager
def using(table: KernelTable) -> Iterator[None]:
    """`use_table` for a while."""
    before = _given
    use_table(table)
    try:
        yield
    finally:
        use_table(before)


def table_name(device: torch.device) -> str:
    """How the files of tables for this GPU are called."""
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()) + ".json"


def _table_of_package(device: torch.device) -> KernelTable | None:
    return package_table(table_name(device)) if device.type == "cuda" else None


@cache
def package_table(name: str) -> KernelTable | None:
    """The committed table in the file of this name, if there is one."""
    file = _FOLDER / name
    return load_table(file) if file.is_file() else None
