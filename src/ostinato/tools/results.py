"""Results of measurements as files and as tables, with the machine and versions they come from."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from ostinato.graphs import OstinatoError

from .machine import machine


class BenchError(OstinatoError, RuntimeError):
    """A benchmark cannot run as requested, or its outputs are wrong; the message says what to do."""


def tell(text: str) -> None:
    """Prints a line of progress on standard error: some benchmarks take minutes on a small machine."""
    print(f"ostinato bench: {text}", file=sys.stderr, flush=True)


def head(benchmark: str, **settings: Any) -> dict[str, Any]:
    """The common beginning of all results: what was measured, where and when."""
    return {"benchmark": benchmark, "machine": machine(), "settings": settings}


def write_json(result: Mapping[str, Any], file: Path) -> None:
    """Write a result; creates folders as needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=2) + "\n")


def read_json(file: Path) -> dict[str, Any]:
    """Read a result written by `write_json`."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"{file} cannot be read as a result: {error}") from error
    if not isinstance(found, dict) or "benchmark" not in found:
        raise BenchError(f"{file} is not the result of a benchmark: it has no field 'benchmark'")
    return found


def make_table(title: str, headings: Iterable[str], rows: Iterable[Iterable[Any]]) -> Table:
    """A table of numbers; None becomes a dash."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def cell(value: Any) -> str:
    """A value as shown in a table: three significant digits, thousands separated."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def share(value: float | None) -> str | None:
    """A fraction as a percentage."""
    return None if value is None else f"{value:.1%}"
