"""How models write tool calls, and which parser reads that."""

from pathlib import Path

from .llama import LlamaToolCalls
from .parser import ToolCallParser
from .qwen import QwenToolCalls


def parser_for(kind: str, tool_names: frozenset[str]) -> ToolCallParser:
    """A parser for one answer; `kind` is qwen or llama."""
    return QwenToolCalls() if kind == "qwen" else LlamaToolCalls(tool_names)


def kind_of_model(directory: Path) -> str:
    """How a model writes tool calls, by its tokenizer's files: qwen, llama or none."""
    files = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    text = "".join((directory / name).read_text() for name in files if (directory / name).is_file())
    if "<tool_call>" in text:
        return "qwen"
    return "llama" if "python_tag" in text else "none"
