"""Ctrl-C while a model answers: the answer ends between two steps, never in the middle of one."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


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
