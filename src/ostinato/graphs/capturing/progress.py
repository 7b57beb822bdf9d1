"""The progress bar of a capture: rung, time, memory."""

import sys
import time
from collections.abc import Sequence
from typing import Self

from ..dispatching.keys import GraphKey


def is_terminal(stream: object) -> bool:
    """Whether somebody watches: a process may have no such stream, a closed one, or one that can do nothing
    but write."""
    isatty = getattr(stream, "isatty", None)
    return isatty is not None and not getattr(stream, "closed", False) and bool(isatty())


class CaptureProgress:
    """Shows the progress of a capture as a bar."""

    def __init__(self, keys: Sequence[GraphKey], shown: bool | None) -> None:
        """`shown`: True, False, or None for 'when standard error is a terminal'."""
        self._total = len(keys)
        self._shown = is_terminal(sys.stderr) if shown is None else shown
        self._started = time.perf_counter()
        self.seconds = 0.0

    def __enter__(self) -> Self:
        if self._shown and self._total:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("capturing {task.description:<34}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[memory]}"),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, memory="")
        return self

    def start(self, key: GraphKey) -> None:
        """A graph is about to be captured."""
        if self._shown:
            self._bar.update(self._task, description=f"{key.mode} {key.descriptor}")

    def done(self, pool_bytes: int) -> None:
        """A graph was captured or dropped."""
        if self._shown:
            self._bar.update(self._task, advance=1, memory=f"{pool_bytes / 2**20:.1f} MiB")

    def __exit__(self, *exception: object) -> None:
        self.seconds = time.perf_counter() - self._started
        if self._shown and self._total:
            self._bar.stop()
