"""Tables on a terminal: one that is too wide is shown in parts, each with its first column."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table

from ostinato.graphs.capturing.progress import is_terminal

WIDTH_OF_FILES = 160
"""Width of the output if it is not a terminal."""


def show(renderable: Any, *, stderr: bool = False) -> None:
    """Print without cutting anything off."""
    is_watched = is_terminal(sys.stderr if stderr else sys.stdout)
    console = Console(width=None if is_watched else WIDTH_OF_FILES, stderr=stderr, highlight=False)
    console.print(fitting(renderable, console))


def fitting(renderable: Any, console: Console) -> Any:
    """The renderable with its tables split into parts that fit the console."""
    if isinstance(renderable, Group):
        return Group(*(fitting(part, console) for part in renderable.renderables))
    if not isinstance(renderable, Table) or _width(renderable, console) <= console.width:
        return renderable
    return Group(*_parts(renderable, console))


def _parts(table: Table, console: Console) -> Iterator[Table]:
    left = list(range(1, len(table.columns)))
    while left:
        count = len(left)
        # At least one column is shown beside the first.
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
    """The width of a table without folded cells; its title may fold."""
    options = console.options.update(max_width=10_000)
    title, table.title = table.title, None
    wanted = Measurement.get(console, options, table).maximum
    table.title = title
    return wanted
