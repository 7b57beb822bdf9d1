"""Tables on a terminal: one with more columns than fit is shown in parts, its first column with each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table

WIDTH_OF_FILES = 160
"""Columns where the output is no terminal."""


def show(renderable: Any, *, stderr: bool = False) -> None:
    """Print, cutting nothing off."""
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    console = Console(width=None if is_terminal else WIDTH_OF_FILES, stderr=stderr, highlight=False)
    console.print(fitting(renderable, console))


def fitting(renderable: Any, console: Console) -> Any:
    """The same with its tables in parts that fit the console."""
    if isinstance(renderable, Group):
        return Group(*(fitting(part, console) for part in renderable.renderables))
    if not isinstance(renderable, Table) or _width(renderable, console) <= console.width:
        return renderable
    return Group(*_parts(renderable, console))


def _parts(table: Table, console: Console) -> Iterator[Table]:
    left = list(range(1, len(table.columns)))
    while left:
        count = len(left)
        # One column beside the first is shown in any case.
        while count > 1 and _width(_of_columns(table, [0, *left[:count]]), console) > console.width:
            count -= 1
        yield _of_columns(table, [0, *left[:count]])
        del left[:count]


def _of_columns(table: Table, numbers: list[int]) -> Table:
    part = Table(title=table.title, title_justify=table.title_justify)
    for number in numbers:
        column = table.columns[number]
        part.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap)
    cells = [list(table.columns[number].cells) for number in numbers]
    for row in zip(*cells, strict=True):
        part.add_row(*row)
    return part


def _width(table: Table, console: Console) -> int:
    """As wide as it wants to be; a title folds."""
    options = console.options.update(max_width=10_000)
    title, table.title = table.title, None
    wanted = Measurement.get(console, options, table).maximum
    table.title = title
    return wanted
