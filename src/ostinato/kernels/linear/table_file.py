"""Tables of choices as JSON files, a line for each choice:

{"gpu": "sm90-132",
 "matrices": [
  {"out_features": 1024, "in_features": 2048, "gated": false, "choices": [
   {"tokens": [1, 1], "kernel": "gemv", "tile": {"rows": 4, "block": 2048, "num_warps": 8}},
   {"tokens": [17, 64], "kernel": "library"}]}]}
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..gpu import Gpu
from . import cuda_fragments, cuda_streamed, cuda_wide
from .kernel_table import Choice, KernelTable
from .tiles import (
    IN_CUDA,
    KERNELS,
    MOST_SHARED_BYTES,
    MOST_TOKENS,
    FragmentsTile,
    MatrixShape,
    SkinnyTile,
    StreamedTile,
    Tile,
    WideTile,
)

_NAMES = {kind: name for name, kind in KERNELS.items()}
# As Triton wants the sizes of its tiles.
_POWERS_OF_TWO = ("rows", "block", "num_warps", "tokens")
_MAY_BE_ZERO = ("held",)


class KernelTableError(ValueError):
    """A table cannot be used; the text names the file, the entry and what is wrong with it."""


def load_table(file: Path) -> KernelTable:
    """Read a file that `save_table` or a user wrote."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise KernelTableError(f"kernel table {file} cannot be read: {error}") from error
    try:
        return _table(content)
    except KernelTableError as error:
        raise KernelTableError(f"kernel table {file}: {error}") from None


def save_table(table: KernelTable, file: Path, **described: Any) -> None:
    """Write a table; `described` says where it comes from."""
    matrices = [
        json.dumps(shape._asdict())[:-1] + ', "choices": [\n   ' + ",\n   ".join(_lines(choices)) + "]}"
        for shape, choices in table.choices.items()
    ]
    head = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in described.items()]
    parts = [f'"gpu": {json.dumps(table.gpu)}', *head, '"matrices": [\n  ' + ",\n  ".join(matrices) + "]"]
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text("{" + ",\n ".join(parts) + "}\n")
    os.replace(new, file)  # a file that is cut off would be refused at every start


def as_entry(tile: Tile) -> dict[str, Any]:
    """A kernel and its tile as a table has them."""
    values = {field.name: getattr(tile, field.name) for field in fields(tile)}
    given = {field.name: values[field.name] for field in fields(tile) if values[field.name] != field.default}
    return {"kernel": _NAMES[type(tile)]} | ({"tile": given} if given else {})


def _lines(choices: Iterable[Choice]) -> Iterator[str]:
    for choice in choices:
        yield json.dumps({"tokens": [choice.first, choice.last]} | as_entry(choice.tile))


def _table(content: Any) -> KernelTable:
    if not isinstance(content, dict) or not isinstance(content.get("gpu"), str):
        raise KernelTableError('it has no "gpu", what it is for: compute capability and multiprocessors')
    if Gpu.named(content["gpu"]) is None:
        raise KernelTableError(
            f'its "gpu" is {content["gpu"]!r}, where it must be a compute capability and a number of '
            "multiprocessors, like sm90-132 (H100, H200): make the table again with `ostinato tune`, or put "
            "that in its place"
        )
    if not isinstance(content.get("matrices"), list):
        raise KernelTableError('it has no list "matrices"')
    choices: dict[MatrixShape, tuple[Choice, ...]] = {}
    for entry in content["matrices"]:
        shape = _shape(entry)
        if shape in choices:
            raise KernelTableError(f"{shape} is there twice")
        choices[shape] = tuple(_choice(shape, given) for given in entry["choices"])
        for one, other in pairwise(choices[shape]):
            if other.first <= one.last:
                raise KernelTableError(
                    f"{shape}: tokens {one.first} to {one.last} and {other.first} to {other.last} "
                    "must be apart and in ascending order"
                )
    return KernelTable(content["gpu"], choices)


def _shape(entry: Any) -> MatrixShape:
    given: list[Any] = [entry.get(name) for name in MatrixShape._fields] if isinstance(entry, dict) else []
    if [type(value) for value in given] != [int, int, bool] or not isinstance(entry.get("choices"), list):
        raise KernelTableError(
            f"a matrix needs out_features, in_features, gated and choices: {_shortened(entry)}"
        )
    return MatrixShape(*given)


def _choice(shape: MatrixShape, given: Any) -> Choice:
    where = f"{shape}: {_shortened(given)}"
    if not isinstance(given, dict) or given.get("kernel") not in KERNELS:
        raise KernelTableError(f"{where}: its kernel must be one of {', '.join(KERNELS)}")
    kind, tokens = KERNELS[given["kernel"]], given.get("tokens")
    if not isinstance(tokens, list) or [type(count) for count in tokens] != [int, int]:
        raise KernelTableError(f"{where}: its tokens must be [first, last]")
    first, last = tokens
    if not 1 <= first <= last <= MOST_TOKENS.get(kind, last):
        limit = f" <= {MOST_TOKENS[kind]} for this kernel" if kind in MOST_TOKENS else ""
        raise KernelTableError(f"{where}: tokens must be 1 <= first <= last{limit}")
    tile = _tile(kind, given.get("tile", {}), where)
    if isinstance(tile, IN_CUDA) and not tile.fits(shape):
        raise KernelTableError(f"{where}: the matrix cannot be divided like that")
    if (needed := _shared_bytes(tile, shape, last)) > MOST_SHARED_BYTES:
        raise KernelTableError(
            f"{where}: a program for {last} tokens would take {needed:,} bytes of shared memory, "
            f"{MOST_SHARED_BYTES:,} are there"
        )
    if isinstance(tile, SkinnyTile) and shape.gated and tile.parts > 1:
        raise KernelTableError(f"{where}: parts of a gated matrix cannot be added")
    return Choice(first, last, tile)


def _tile(kind: type[Tile], given: Any, where: str) -> Tile:
    known: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}
    needed = {name for name, field in known.items() if field.default is MISSING}
    if not isinstance(given, Mapping) or not needed <= set(given) <= set(known):
        expected = ", ".join(name if name in needed else f"{name} (optional)" for name in known) or "nothing"
        raise KernelTableError(f"{where}: a tile of {_NAMES[kind]} has {expected}")
    for name, value in given.items():
        if type(value) is not int or value < (name not in _MAY_BE_ZERO):
            raise KernelTableError(f"{where}: {name} must be a number")
        if kind not in IN_CUDA and name in _POWERS_OF_TWO and (value == 0 or value & (value - 1)):
            raise KernelTableError(f"{where}: {name} must be a power of two")
    return kind(**given)


def _shared_bytes(tile: Tile, shape: MatrixShape, num_tokens: int) -> int:
    """Of a program; 0 where a kernel sees to that itself."""
    norm = shape.in_features <= shape.out_features  # matrices that make rows longer follow one
    if isinstance(tile, FragmentsTile):
        return cuda_fragments.shared_bytes(tile, shape, tile.compiled_tokens(num_tokens), norm=norm)
    if isinstance(tile, StreamedTile):
        return cuda_streamed.shared_bytes(tile, shape, tile.compiled_tokens(num_tokens), norm=norm)
    if isinstance(tile, WideTile):
        return cuda_wide.shared_bytes(tile, shape, scaled=norm)
    return 0


def _shortened(given: Any) -> str:
    text = json.dumps(given)
    return text if len(text) <= 160 else text[:160] + "..."
