"""Signals wait while an engine is in the middle of something.

Python runs signal handlers in the main thread between any two instructions, and what they raise
(KeyboardInterrupt, or the exception of a user's own alarm) surfaces there: between two lines that belong
together. A call therefore holds signals back and lets them through only between two steps, where everything
is consistent. Exceptions raised from other threads cannot be held back; see Note [Failed steps] in core.
"""

from __future__ import annotations

import _signal  # `signal` makes an enum of everything these return, which takes longer than a step may
import signal
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

_NAMES = ("INT", "TERM", "HUP", "QUIT", "ALRM", "VTALRM", "PROF", "USR1", "USR2", "BREAK")
_SIGNALS = [getattr(signal, f"SIG{name}") for name in _NAMES if hasattr(signal, f"SIG{name}")]


class HeldSignals:
    """Signals that arrive inside wait for `let_through`, or for the end; if nested, for those of the outer
    one.

    Only handlers written in Python wait: signals that end the process still do so at once. In any thread but
    the main one there is nothing to hold.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._noted: deque[tuple[int, FrameType | None]] = deque()
        self._is_holding = False

    def __enter__(self) -> HeldSignals:
        if threading.get_ident() != threading.main_thread().ident:
            return self
        try:
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self._note)
        except BaseException:
            self._put_back()
            raise
        self._is_holding = True
        return self

    def __exit__(self, *_: object) -> None:
        # From here on signals pass at once, so that none is lost wherever this is interrupted.
        self._is_holding = False
        try:
            self._put_back()
        finally:
            self._put_back()
        self.let_through()

    def let_through(self) -> None:
        """Handle the signals that have arrived; raises what their handlers raise."""
        while self._noted:
            number, frame = self._noted.popleft()
            self._handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_holding:
            self._noted.append((number, frame))
        else:
            self._handlers[number](number, frame)

    def _put_back(self) -> None:
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) == self._note:  # otherwise another one has been set since
                _signal.signal(number, handler)
