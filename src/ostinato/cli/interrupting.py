"""Ctrl-C: before a model is loaded it ends the process; an answer ends between two steps, never in one."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


def import_engine() -> None:
    """Import what takes seconds. Ctrl-C then ends the process without a word: torch swallows one in the
    middle of importing NumPy, and what is half imported fails later."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import ostinato.engine.llm  # noqa: F401
    finally:
        signal.signal(signal.SIGINT, usual)


class CtrlC:
    """Records the first Ctrl-C in `asked`; a second one interrupts as usual."""

    def __init__(self) -> None:
        self.asked = False
        self._usual: Any = None

    def __enter__(self) -> CtrlC:
        self._usual = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._usual)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, self._usual)
