"""Flags made from the fields of a dataclass, whose docstrings are the help.

The source is read, not imported: the dataclasses live beside code that needs torch, and --help must answer at
once.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

_PACKAGE = Path(__file__).parents[1]

ALIASES = {
    "model": ["--model-path"],
    "max_model_len": ["--context-length"],
    "max_running_requests": ["--max-num-seqs"],
    "mem_fraction": ["--gpu-memory-utilization", "--mem-fraction-static"],
    "cuda_graph_mode": ["--cudagraph-mode"],
    "disable_cuda_graph": ["--enforce-eager"],
}
"""What users of vLLM and SGLang call the same thing."""


@dataclass(frozen=True)
class Flag:
    """One field as a flag."""

    name: str
    kind: str
    """The field's type as written in the source."""
    default: str
    """Its default as written in the source."""
    help: str

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter of a command. None stands for: not given."""
        flags = ["--" + self.name.replace("_", "-"), *ALIASES.get(self.name, [])]
        if self.kind == "bool":
            flags[0] += "/--no-" + self.name.replace("_", "-")
        option = typer.Option(*flags, help=self._help, show_default=False)
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[self._typed, option],
        )

    @property
    def _help(self) -> str:
        shown = "" if self.default in ("None", "False") else f" [default: {ast.literal_eval(self.default)}]"
        return self.help + shown + _HOW_TO_WRITE.get(self._shape, "")

    @property
    def _shape(self) -> str:
        for word, shape in (("Mapping", "biases"), ("Sequence[str]", "texts")):
            if word in self.kind:
                return shape
        return "numbers" if "Sequence[int]" in self.kind or "tuple[int" in self.kind else "plain"

    @property
    def _typed(self) -> Any:
        shape = self._shape
        if shape in ("biases", "texts"):
            return list[str] | None
        if shape == "numbers":
            return str | None
        plain = self.kind.removesuffix(" | None")
        return {"int": int, "float": float, "bool": bool, "str": str}[plain] | None

    def value(self, given: Any) -> Any:
        """What the field gets for what was typed."""
        try:
            if self._shape == "numbers":
                return tuple(int(part) for part in given.split(","))
            if self._shape == "biases":
                return {int(token): float(bias) for token, bias in (entry.split("=") for entry in given)}
        except ValueError:
            flag = "--" + self.name.replace("_", "-")
            raise typer.BadParameter(f"{flag}: {given!r} is not{_HOW_TO_WRITE[self._shape]}") from None
        return given


_HOW_TO_WRITE = {
    "numbers": " (as 1,2,4)",
    "biases": " (as TOKEN_ID=BIAS, may be repeated)",
    "texts": " (may be repeated)",
}


@cache
def flags_of(file: str, class_name: str) -> tuple[Flag, ...]:
    """The fields of a dataclass in `file`, relative to the package."""
    tree = ast.parse((_PACKAGE / file).read_text())
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    flags = []
    for field, text in pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name) or not field.value:
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            kind, default = ast.unparse(field.annotation), ast.unparse(field.value)
            flags.append(Flag(field.target.id, kind, default, " ".join(str(text.value.value).split())))
    return tuple(flags)


def with_flags(**groups: Sequence[Flag]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command these flags; those given arrive as one dictionary per group, under the group's name."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [
            p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name not in groups
        ]

        def called(**given: Any) -> Any:
            for group, flags in groups.items():
                typed: Mapping[str, Any] = {flag.name: given.pop(flag.name) for flag in flags}
                given[group] = {
                    flag.name: flag.value(typed[flag.name]) for flag in flags if typed[flag.name] is not None
                }
            return command(**given)

        parameters = [*own, *(flag.parameter for flags in groups.values() for flag in flags)]
        called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        )
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        called.__doc__, called.__name__ = command.__doc__, command.__name__
        return called

    return decorate
