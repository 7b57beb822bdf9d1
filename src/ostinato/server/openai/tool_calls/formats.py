"""How models write tool calls, and which parser reads that."""

import json
from dataclasses import dataclass
from pathlib import Path

from .llama import LlamaToolCalls
from .parser import ToolCallParser
from .qwen import QwenToolCalls


@dataclass(frozen=True)
class CallLayout:
    """The text around the arguments of a call."""

    opening: str
    key: str
    """Of the arguments, beside `name`."""
    end: str
    trigger: str
    """No call begins otherwise."""
    between: str
    """Between two calls."""

    def begin(self, name: str) -> str:
        """What comes before the arguments of this function."""
        return f'{self.opening}{{"name": {json.dumps(name)}, "{self.key}": '


_LAYOUTS = {
    "qwen": CallLayout("<tool_call>\n", "arguments", "}\n</tool_call>", "<tool_call>", "\n"),
    "llama": CallLayout("", "parameters", "}", '{"name": "', "; "),
}


def layout_of(kind: str) -> CallLayout:
    """How a model of this kind writes calls; `kind` is qwen or llama."""
    return _LAYOUTS[kind]


def parser_for(kind: str, tool_names: frozenset[str]) -> ToolCallParser:
    """A parser for one answer; `kind` is qwen or llama."""
    return QwenToolCalls() if kind == "qwen" else LlamaToolCalls(tool_names)


def kind_of_model(directory: Path) -> str:
    """How a model writes tool calls, by its tokenizer's files: qwen, llama or none."""
    template = chat_template_of(directory)
    if "<tool_call>" in template:
        return "qwen"
    return "llama" if "python_tag" in template else "none"


def chat_template_of(directory: Path) -> str:
    """The sources of all chat templates in a model's tokenizer files; empty where there is none."""
    if (file := directory / "chat_template.jinja").is_file():
        return file.read_text()
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (file := directory / name).is_file() and (
            found := json.loads(file.read_text()).get("chat_template")
        ):
            return found if isinstance(found, str) else "\n".join(entry["template"] for entry in found)
    return ""
