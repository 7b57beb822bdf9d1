"""Tables of measured choices: which kernel, with which tile, runs a matrix at how many tokens.

A table is a JSON file with a line for each choice:

{"gpu": "sm90-132",
 "matrices": [
  {"out_features": 1024, "in_features": 2048, "gated": false, "choices": [
   {"tokens": [1, 1], "kernel": "gemv", "tile": {"rows": 4, "block": 2048, "num_warps": 8}},
   {"tokens": [17, 64], "kernel": "library"}]}]}

It is for weights of one format: "plain", unless it has a "format".
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..gpu import Gpu
from ..registry import PLAIN
from .rules import weight_formats
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


@dataclass(frozen=True)
class Choice:
    """The tile of a matrix at `first` to `last` tokens."""

    first: int
    last: int
    tile: Tile


@dataclass(frozen=True)
class KernelTable:
    """The choices for a kind of GPU; each matrix has ranges of tokens, apart and in ascending order."""

    gpu: str
    """As `str(Gpu)` says it."""
    choices: Mapping[MatrixShape, tuple[Choice, ...]]
    format: str = PLAIN
    """Of the weights."""

    def find(self, shape: MatrixShape, num_tokens: int) -> Tile | None:
        """Returns the tile of the range that `num_tokens` is in; None if there is no such range."""
        for choice in self.choices.get(shape, ()):
            if choice.first <= num_tokens <= choice.last:
                return choice.tile
        return None

    def but(self, shape: MatrixShape, new: Choice) -> KernelTable:
        """Returns the same table, except for the tokens of one choice."""
        kept = [part for old in self.choices.get(shape, ()) for part in _outside(old, new)]
        ordered = sorted([*kept, new], key=lambda choice: choice.first)
        return KernelTable(self.gpu, {**self.choices, shape: tuple(_merged(ordered))}, self.format)


def _outside(old: Choice, new: Choice) -> Iterator[Choice]:
    """Yields what is left of `old` where `new` takes its tokens."""
    if old.first < new.first:
        yield Choice(old.first, min(old.last, new.first - 1), old.tile)
    if old.last > new.last:
        yield Choice(max(old.first, new.last + 1), old.last, old.tile)


def _merged(ordered: Iterable[Choice]) -> list[Choice]:
    """Returns neighbours with the same tile as one."""
    merged: list[Choice] = []
    for choice in ordered:
        if merged and merged[-1].tile == choice.tile and merged[-1].last + 1 == choice.first:
            choice = Choice(merged.pop().first, choice.last, choice.tile)
        merged.append(choice)
    return merged


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
    if table.format != PLAIN:
        described = {"format": table.format} | described
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
    format = content.get("format", PLAIN)
    if format not in weight_formats():
        raise KernelTableError(
            f'its "format" is {format!r}, for which there are no kernels; there are some for '
            + ", ".join(weight_formats())
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
    return KernelTable(content["gpu"], choices, format)


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
    """Returns the shared memory of a CTA; 0 for kernels that see to that themselves."""
    if not isinstance(tile, FragmentsTile | StreamedTile | WideTile):
        return 0
    # Matrices that make rows longer follow a norm.
    return tile.shared_bytes(shape, num_tokens, norm=shape.in_features <= shape.out_features)


def _shortened(given: Any) -> str:
    text = json.dumps(given)
    return text if len(text) <= 160 else text[:160] + "..."
