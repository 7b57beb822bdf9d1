"""What the graphs are and what they did, as a table for people and as JSON for programs."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from .dispatching.mode import GraphMode

if TYPE_CHECKING:
    from rich.console import Group

    from .capturing.captured import CapturedGraph


@dataclass(frozen=True)
class GraphRow:
    """One graph's line in the report."""

    mode: str
    descriptor: str
    num_tokens: int
    num_reqs: int
    segments: int
    """Captured pieces; more than one for a piecewise graph."""
    nodes: int | None
    """Graph nodes; on the tape, recorded calls."""
    bytes: int
    """How much the pool grew for this graph, including its own bridges and results."""
    capture_ms: float
    """Time of the recording."""
    total_ms: float
    """Time of the recording and the warm-ups before it."""
    replays: int
    padding_waste: float
    """Fraction of replayed token rows that were padding."""
    predicted_bytes: int | None = None
    """How much the pool was expected to grow for this graph; None if no budget required a prediction."""
    padding_saved: float = 0.0
    """Average tokens of padding that the graph saves per step, if all sizes are equally frequent. A step that
    no larger graph of the same kind would serve counts as padded to twice the largest size."""


def describe(graph: "CapturedGraph") -> GraphRow:
    """The report's row for one graph."""
    descriptor, recorded = graph.descriptor, graph.recorded
    return GraphRow(
        mode=str(graph.key.mode),
        descriptor=str(descriptor),
        num_tokens=descriptor.num_tokens,
        num_reqs=descriptor.num_reqs,
        segments=len(recorded.graph.steps) - recorded.graph.boundaries,
        nodes=recorded.nodes,
        bytes=recorded.bytes,
        capture_ms=recorded.seconds * 1e3,
        total_ms=graph.seconds * 1e3,
        replays=graph.replays,
        padding_waste=graph.padding_waste,
    )


@dataclass(frozen=True)
class Report:
    """A snapshot of a runner's graphs and counters."""

    backend: str
    device: str
    mode: str
    lowered: str | None
    """Why the mode is lower than requested; None if it is not."""
    graphs: tuple[GraphRow, ...]
    failures: Mapping[str, str]
    """Graphs that were dropped or could not be captured, with the cause."""
    eager_steps: Mapping[str, int]
    """Steps that ran without a graph, by reason."""
    pool_bytes: int
    input_bytes: int

    @classmethod
    def of_nothing(cls, mode: GraphMode, eager_steps: Mapping[Any, int]) -> "Report":
        """The report if nothing has been captured."""
        eager = {str(reason): count for reason, count in eager_steps.items()}
        return cls("none", "none", str(mode), None, (), {}, eager, pool_bytes=0, input_bytes=0)

    @classmethod
    def joined(cls, reports: Sequence["Report"]) -> "Report":
        """One report for runners that share a pool and the counts of eager steps."""
        first = reports[0]
        return replace(
            first,
            graphs=tuple(row for report in reports for row in report.graphs),
            failures={
                key if number == 0 else f"{key} (runner {number + 1})": cause
                for number, report in enumerate(reports)
                for key, cause in report.failures.items()
            },
            input_bytes=sum(report.input_bytes for report in reports),
        )

    @property
    def replays(self) -> int:
        """Steps served from graphs."""
        return sum(row.replays for row in self.graphs)

    @property
    def capture_ms(self) -> float:
        """Time spent recording, without warm-ups."""
        return sum(row.capture_ms for row in self.graphs)

    @property
    def padding_waste(self) -> float:
        """Fraction of all replayed token rows that were padding."""
        rows = [row.replays * row.num_tokens for row in self.graphs]
        padded = sum(n * row.padding_waste for n, row in zip(rows, self.graphs, strict=True))
        return padded / sum(rows) if any(rows) else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The whole report, including totals, as plain values."""
        totals = {
            "graphs": len(self.graphs),
            "replays": self.replays,
            "eager_steps": sum(self.eager_steps.values()),
            "capture_ms": self.capture_ms,
            "padding_waste": self.padding_waste,
        }
        return {**asdict(self), "totals": totals}

    def json(self, indent: int | None = 2) -> str:
        """The report as JSON."""
        return json.dumps(self.as_dict(), indent=indent)

    def table(self) -> "Group":
        """The report as a `rich` renderable, narrow enough for 80 columns.

        Columns: `seg`: segments; `MiB`: how much the pool grew; `plan`: how much it was expected to grow;
        `ms`: time of the recording; `saves`: tokens of padding that the graph saves in an average step;
        `runs`: replays; `waste`: fraction of padding in them.
        """
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        title = f"{len(self.graphs)} graphs, mode {self.mode}, {self.backend} on {self.device}"
        table = Table(
            title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="underline"
        )
        for heading in ("mode", "batch"):
            table.add_column(heading, no_wrap=True)
        is_predicted = any(row.predicted_bytes is not None for row in self.graphs)
        plan = ("plan",) if is_predicted else ()
        for heading in ("seg", "nodes", "MiB", *plan, "ms", "saves", "runs", "waste"):
            table.add_column(heading, justify="right")
        for row in self.graphs:
            nodes = "?" if row.nodes is None else f"{row.nodes:,}"
            cells = (
                str(row.segments),
                nodes,
                f"{row.bytes / 2**20:,.1f}",
                *([_mib(row.predicted_bytes)] if is_predicted else []),
                f"{row.capture_ms:.{0 if row.capture_ms >= 100 else 1}f}",
                f"{row.padding_saved:.1f}",
                f"{row.replays:,}",
            )
            table.add_row(row.mode, row.descriptor, *cells, f"{row.padding_waste:.1%}")
        eager = ", ".join(f"{reason} {count:,}" for reason, count in self.eager_steps.items())
        lines = [
            f"replays {self.replays:,}, padding {self.padding_waste:.1%}, capture {self.capture_ms:.1f} ms",
            f"pool {self.pool_bytes:,} bytes, inputs {self.input_bytes:,} bytes",
            f"eager steps: {eager or 'none'}",
        ]
        lines += [f"lowered: {self.lowered}"] if self.lowered else []
        lines += [f"no graph for {key}: {cause}" for key, cause in self.failures.items()]
        return Group(table, *(Text(line) for line in lines))

    def __str__(self) -> str:
        from rich.console import Console

        # Usual rows fit into 80 columns; longer ones are not cut off.
        console = Console(width=100, no_color=True)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def _mib(nbytes: int | None) -> str:
    return "?" if nbytes is None else f"{nbytes / 2**20:,.1f}"


def without_numbers(cause: str) -> str:
    """What the cause of a failure has in common with that of another capture size."""
    return re.sub(r"\d+(, \d+)*", "#", cause)
