"""The progress bar over the prompts of one call."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Self

from ostinato.graphs.capturing.progress import is_terminal

Shown = bool | Callable[..., Any] | None
"""Whether there is a bar: True, False, None for 'when standard error is a terminal', or a function that makes
one, called like tqdm."""


class RequestProgress:
    """Shows how many prompts are done and the tokens per second; silent unless shown."""

    def __init__(self, total: int, shown: Shown) -> None:
        """`shown`: see `Shown`."""
        self._total = total
        self._make = shown if callable(shown) else None
        self._theirs: Any = None
        self._shown = is_terminal(sys.stderr) if shown is None else shown is True
        self._tokens = 0
        self._started = time.perf_counter()

    def __enter__(self) -> Self:
        if self._make is not None:
            self._theirs = self._make(total=self._total, desc="Processed prompts")
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
        """`ended` prompts ended, and `tokens` outputs grew by a token each."""
        if self._theirs is not None and ended:
            self._theirs.update(ended)
        if self._shown:
            self._tokens += tokens
            rate = self._tokens / (time.perf_counter() - self._started)
            self._bar.update(self._task, advance=ended, rate=f"{rate:,.0f} tokens/s")

    def __exit__(self, *exception: object) -> None:
        if self._theirs is not None:
            self._theirs.close()
        if self._shown:
            self._bar.stop()
