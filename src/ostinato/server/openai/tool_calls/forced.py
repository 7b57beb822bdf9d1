"""An answer that is the arguments of a chosen function and nothing else."""

from __future__ import annotations

from .call_reader import CallPiece
from .parser import Parsed


class ForcedToolCall:
    """All text is arguments: the engine lets nothing else come."""

    def __init__(self, name: str) -> None:
        self.num_calls = 0
        self._name = name

    def push(self, text: str) -> Parsed:
        """Take in a piece of the answer."""
        if not text:
            return Parsed()
        name = None if self.num_calls else self._name
        self.num_calls = 1
        return Parsed(calls=[CallPiece(0, name, text)])

    def finish(self) -> Parsed:
        """Nothing is held back."""
        return Parsed()
