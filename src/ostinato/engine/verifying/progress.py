"""The progress bar over the graphs of a verification."""

from __future__ import annotations

import sys
from typing import Self

from ostinato.graphs.capturing.progress import is_terminal


class VerifyProgress:
    """Shows which graph is being checked; silent unless shown."""

    def __init__(self, total: int, shown: bool | None) -> None:
        """`shown`: True, False, or None for 'when standard error is a terminal'."""
        self._total = total
        self._shown = is_terminal(sys.stderr) if shown is None else shown

    def __enter__(self) -> Self:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("verifying {task.description:<34}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def start(self, name: str) -> None:
        """This is about to be checked."""
        if self._shown:
            self._bar.update(self._task, description=name)

    def done(self) -> None:
        """A graph was checked."""
        if self._shown:
            self._bar.update(self._task, advance=1)

    def __exit__(self, *exception: object) -> None:
        if self._shown:
            self._bar.stop()
