"""Flags generated from the fields of a dataclass; the fields' docstrings are the help text.

The source is parsed, not imported: the dataclasses live beside code that needs torch, and --help must answer
at once.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from ostinato.engine.peer_options.translation import ROWS

_PACKAGE = Path(__file__).parents[1]

_SHAPES = (
    ("Mapping[str", "json"),
    ("Mapping", "biases"),
    ("[str", "texts"),
    ("tuple[Any", "texts"),
)
"""How a value is written on the command line, by a part of the field's type."""

NUMBERS = "N,N,..."
"""How the help shows a list of numbers; spaces work as separators too."""


@dataclass(frozen=True)
class Flag:
    """The flag of one field."""

    name: str
    kind: str
    """The field's type as written in the source."""
    default: str
    """The field's default as written in the source."""
    help: str
    group: str = "Options"
    """The help section it belongs to."""

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter of a command; None means not given."""
        flag = "--" + self.name.replace("_", "-")
        if self.kind == "bool":
            flag += "/--no-" + self.name.replace("_", "-")
        option = typer.Option(
            flag,
            help=self._help,
            show_default=False,
            metavar=_METAVARS.get(self._shape),
            rich_help_panel="CUDA graphs" if "graph" in self.name else self.group,
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[self._typed, option],
        )

    @property
    def _help(self) -> str:
        return " ".join(filter(None, (self.help, self._default, self._also, _HOW_TO_WRITE.get(self._shape))))

    @property
    def _default(self) -> str:
        """The default, unless the help text states it."""
        value = ast.literal_eval(self.default)
        if "efault: " in self.help or value is None or value == ():
            return ""
        if isinstance(value, bool):
            value = "on" if value else "off"
        return f"[default: {value}]"

    @property
    def _also(self) -> str:
        names = [row.flags[0] for row in ROWS if row.becomes == self.name and not row.convert]
        return f"[also: {', '.join(names)}]" if names else ""

    @property
    def _shape(self) -> str:
        for word, shape in _SHAPES:
            if word in self.kind:
                return shape
        return "numbers" if "Sequence[int]" in self.kind or "tuple[int" in self.kind else "plain"

    @property
    def _typed(self) -> Any:
        shape = self._shape
        if shape in ("biases", "texts"):
            return list[str] | None
        if shape in ("numbers", "json"):
            return str | None
        plain = self.kind.removesuffix(" | None")
        return {"int": int, "float": float, "bool": bool, "str": str}[plain] | None

    def value(self, given: Any) -> Any:
        """The field's value for what was given on the command line."""
        try:
            if self._shape == "numbers":
                return tuple(int(part) for part in given.replace(",", " ").split())
            if self._shape == "json":
                return dict(json.loads(given))
            if self._shape == "texts":
                return tuple(given)
            if self._shape == "biases":
                return {int(token): float(bias) for token, bias in (entry.split("=") for entry in given)}
        except (ValueError, TypeError):
            flag = "--" + self.name.replace("_", "-")
            how = _HOW_TO_WRITE[self._shape]
            raise typer.BadParameter(f"{flag}: {given!r} cannot be parsed {how}") from None
        return tuple(given) if self.kind.startswith("tuple[str") else given


_HOW_TO_WRITE = {
    "numbers": "(as 1,2,4)",
    "biases": "(as TOKEN_ID=BIAS; may be repeated)",
    "texts": "(may be repeated)",
    "json": "(as a JSON object)",
}
_GROUPS = {"EngineConfig": "Model and engine", "SamplingParams": "Sampling", "ServerConfig": "Server"}
_METAVARS = {"numbers": NUMBERS, "biases": "TOKEN_ID=BIAS", "json": "JSON"}


@cache
def flags_of(file: str, class_name: str) -> tuple[Flag, ...]:
    """The flags for the fields of a dataclass in `file`, a path relative to the package."""
    tree = ast.parse((_PACKAGE / file).read_text())
    [body] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    flags = []
    for field, text in pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name) or not field.value:
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            kind, default = ast.unparse(field.annotation), ast.unparse(field.value)
            help_text = " ".join(str(text.value.value).split())
            flags.append(Flag(field.target.id, kind, default, help_text, _GROUPS.get(class_name, "Options")))
    return tuple(flags)


def with_flags(**groups: Sequence[Flag]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add these flags to a command, which gets the given ones as one dictionary per group."""

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
