"""Tables that are wider than the terminal: in parts, with nothing cut off."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from ostinato.bench.decode import decode_tables
from ostinato.bench.graphs import as_tables as graphs_tables
from ostinato.bench.host import host_tables
from ostinato.cli.narrow_tables import fitting
from ostinato.graphs.report import GraphRow, Report
from ostinato.tools.results import make_table, read_json

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def printed(renderable: Any, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(fitting(renderable, console))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_wide_table_is_shown_in_parts_and_a_narrow_one_is_not() -> None:
    headings = [f"heading {number}" for number in range(9)]
    table = make_table("a title", headings, [[f"cell {row}.{at}" for at in range(9)] for row in range(2)])
    lines = printed(Group(table, Text("behind it")), 80)
    assert max(map(len, lines)) <= 80
    for number in range(9):
        assert any(f"heading {number}" in line for line in lines)
        assert any(f"cell 1.{number}" in line for line in lines)
    assert sum("heading 0" in line for line in lines) == 2, "the first column tells the rows apart"
    assert lines[-1] == "behind it"
    assert sum("heading 0" in line for line in printed(table, 200)) == 1


def test_a_table_of_one_column_is_left_alone() -> None:
    table = Table("x" * 100)
    table.add_row("y")
    assert fitting(table, Console(width=80)) is not None


@pytest.mark.parametrize(
    ("name", "tables"),
    [("decode-qwen3-0.6b", decode_tables), ("host-qwen3-0.6b", host_tables), ("graphs", graphs_tables)],
)
def test_benchmarks_are_readable_at_80_columns(name: str, tables: Any) -> None:
    lines = printed(tables(read_json(RESULTS / f"{name}-h200.json")), 80)
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_the_report_of_graphs_fits_80_columns() -> None:
    usual = GraphRow(
        "piecewise", "decode 256x1 context<=8192", 256, 256, 31, 1_345, 1 << 24, 562.2, 6, 10**4, 0.5, 1 << 24
    )
    huge = GraphRow(
        "piecewise", "decode 256x1 context<=131072", 256, 256, 31, 12_345, 1 << 34, 5625.2, 6, 10**6, 1
    )
    told = []
    for row in (usual, huge):
        report = Report("cuda", "cuda:0", "full-and-piecewise", None, (row,), {}, {}, 1 << 34, 1 << 20)
        told.append(str(report))
        assert "…" not in told[-1]
    assert max(len(line.rstrip()) for line in told[0].splitlines()) <= 80
    assert "16,384.0" in told[1]
