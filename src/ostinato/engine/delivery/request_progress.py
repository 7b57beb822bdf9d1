"""The bar over the prompts of one call."""

from __future__ import annotations

import sys
import time
from typing import Self


class RequestProgress:
    """Shows how many prompts are done and how many tokens come per second; silent where nobody watches."""

    def __init__(self, total: int, shown: bool | None) -> None:
        """`shown`: True, False, or None for 'when standard error is a terminal'."""
        self._total = total
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._tokens = 0
        self._started = time.perf_counter()

    def __enter__(self) -> Self:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("prompts"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[rate]}"),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total, rate="")
        return self

    def update(self, ended: int, tokens: int) -> None:
        """So many prompts ended, and so many outputs grew by a token."""
        if self._shown:
            self._tokens += tokens
            rate = self._tokens / (time.perf_counter() - self._started)
            self._bar.update(self._task, advance=ended, rate=f"{rate:,.0f} tokens/s")

    def __exit__(self, *exception: object) -> None:
        if self._shown:
            self._bar.stop()
