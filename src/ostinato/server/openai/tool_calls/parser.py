"""What finds tool calls in an answer while it streams, and what it gives out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from .call_reader import CallPiece


@dataclass
class Parsed:
    """What a piece of text turned out to be."""

    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)


class ToolCallParser(Protocol):
    """Text in, content and calls out; what may become either is held back."""

    num_calls: int
    """Calls found so far."""

    def push(self, text: str) -> Parsed:
        """Take in a piece of the answer."""

    def finish(self) -> Parsed:
        """The answer is over."""


def held_back(text: str, tag: str) -> int:
    """How many last characters of `text` could be the beginning of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
