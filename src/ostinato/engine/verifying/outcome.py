"""What a verification found: for people (a table), for programs (JSON), and as an error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.graphs import VerifyError

if TYPE_CHECKING:
    from rich.console import Group

_MOST_OF_A_GRAPH = 2
"""Failures of one graph that are shown; the JSON has all."""


@dataclass(frozen=True)
class Check:
    """One comparison after one launch of one graph."""

    graph: str
    """Its name, as in the report: mode and size."""
    batch: str
    """What it ran on."""
    kind: str
    """`plain`, or `poison`: padding, page 0 and dead outputs held hostile values."""
    what: str
    """What was compared."""
    error: float
    """Relative for numbers; a count of wrong ones for what must be equal."""
    tolerance: float
    """The largest error that passes."""
    detail: str = ""
    """More about a failure."""

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; NaN is not."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        found = (
            f"error {self.error:.3g} > {self.tolerance:.3g}" if self.tolerance else f"{self.error:g} wrong"
        )
        text = f"{self.what}: {found} ({self.batch}, {self.kind})"
        return f"{text}: {self.detail}" if self.detail else text


@dataclass(frozen=True)
class EngineVerification:
    """The outcome of `LLM.verify`."""

    checks: tuple[Check, ...]
    tolerances: Mapping[str, float]
    """Largest relative errors that pass, by what is compared."""
    rounding: Mapping[str, float] = field(default_factory=dict)
    """The effect of rounding to the model's type alone, by what is compared; tolerances follow from it."""
    seconds: float = 0.0
    given_up: Mapping[str, str] = field(default_factory=dict)
    """Graphs that were never captured, with the cause: their batches run from other graphs or eagerly."""

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)

    def by_graph(self) -> dict[str, list[Check]]:
        """The checks of each graph."""
        found: dict[str, list[Check]] = {}
        for check in self.checks:
            found.setdefault(check.graph, []).append(check)
        return found

    def raise_if_failed(self) -> None:
        """Raises VerifyError with the failures by graph, if there are any."""
        if self.passed:
            return
        lines = self._complaints()
        raise VerifyError(
            f"{len(lines)} of {len(self.by_graph())} graphs are wrong "
            f"({len(self.failures)} of {len(self.checks)} checks failed):\n  " + "\n  ".join(lines)
        )

    def _complaints(self) -> list[str]:
        """A line for each wrong graph."""
        lines = []
        for name, checks in self.by_graph().items():
            failed = [check for check in checks if not check.passed]
            if failed:
                told = "; ".join(map(str, failed[:_MOST_OF_A_GRAPH]))
                more = len(failed) - _MOST_OF_A_GRAPH
                lines.append(f"{name}: {told}" + (f"; and {more} more" if more > 0 else ""))
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values; NaN and infinite errors as text."""
        checks = [{**asdict(check), "passed": check.passed} for check in self.checks]
        for check in checks:
            if not math.isfinite(check["error"]):
                check["error"] = str(check["error"])
        head = {"passed": self.passed, "graphs": len(self.by_graph()), "seconds": self.seconds}
        about = {"tolerances": dict(self.tolerances), "rounding": dict(self.rounding)}
        return {**head, **about, "given_up": dict(self.given_up), "checks": checks}

    def write_json(self, file: Path) -> None:
        """Everything, into a file, folders included."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(self.as_dict(), indent=2, allow_nan=False) + "\n")

    def table(self) -> Group:
        """A line for each graph with its largest errors, then the failures; fits 80 columns."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self._title(), title_justify="left")
        table.add_column("graph", overflow="fold")
        for heading in ("checks", "logits", "KV", "wrong"):
            table.add_column(heading, justify="right")
        table.add_column("")
        for name, checks in self.by_graph().items():
            errors = [_largest(checks, what) for what in ("logits", "kv")]
            wrong = sum(not check.passed for check in checks)
            verdict = "FAILED" if wrong else "ok"
            table.add_row(name, str(len(checks)), *errors, str(wrong or ""), verdict)
        limits = ", ".join(f"{what} {value:.2g}" for what, value in self.tolerances.items())
        lines = [f"errors are relative; largest that pass: {limits}"]
        lines += [f"given up: {name}: {cause}" for name, cause in self.given_up.items()]
        lines += [f"FAILED {complaint}" for complaint in self._complaints()]
        return Group(table, *(Text(line) for line in lines))

    def _title(self) -> str:
        count = len(self.by_graph())
        if self.passed:
            return f"{count} graphs are right: {len(self.checks)} checks, {self.seconds:.1f} s"
        wrong = len({check.graph for check in self.failures})
        return f"{wrong} of {count} graphs are WRONG: {len(self.failures)} of {len(self.checks)} checks"

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=80, no_color=True)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def _largest(checks: list[Check], what: str) -> str:
    errors = [check.error for check in checks if check.what == what]
    return f"{max(errors):.1e}" if errors else ""
