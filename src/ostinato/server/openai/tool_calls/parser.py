"""Finds tool calls in an answer while it streams: which parser a model needs, and what parsers give out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
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


def parser_for(kind: str, tool_names: frozenset[str]) -> ToolCallParser:
    """A parser for one answer; `kind` is qwen or llama."""
    from .llama import LlamaToolCalls
    from .qwen import QwenToolCalls

    return QwenToolCalls() if kind == "qwen" else LlamaToolCalls(tool_names)


def kind_of_model(directory: Path) -> str:
    """How a model writes tool calls, by its tokenizer's files: qwen, llama or none."""
    files = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    text = "".join((directory / name).read_text() for name in files if (directory / name).is_file())
    if "<tool_call>" in text:
        return "qwen"
    return "llama" if "python_tag" in text else "none"
