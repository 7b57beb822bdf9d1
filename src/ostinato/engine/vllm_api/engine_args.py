"""`EngineArgs` and `AsyncEngineArgs`: options of an engine as one object and as flags, under vLLM's names.

The fields come from the table of `peer_options`; options of ours that vLLM does not have are fields too.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any, Self

from ostinato.graphs import ConfigError

from ..config import EngineConfig
from ..peer_options.option import Effect, PeerOption, acts
from ..peer_options.translation import OF_LLM
from ..peer_options.typed_values import parsed
from .llm_options import engine_config

_KINDS = {
    "str": "text",
    "int": "int",
    "bool": "flag",
    "float": "float",
    "tuple[int, ...]": "ints",
    "tuple[Any, ...]": "texts",
    "Mapping[str, Any]": "json",
}
_OURS = {entry.name: entry for entry in dataclasses.fields(EngineConfig)}


def _rows() -> dict[str, PeerOption]:
    theirs = {name: row for name, row in OF_LLM.items() if "vllm" in row.peers}
    covered = {row.becomes for row in theirs.values()}
    for name, entry in _OURS.items():
        if name not in theirs and name not in covered:
            kind = _KINDS[str(entry.type).removesuffix(" | None")]
            theirs[name] = acts(name, "vllm", kind, "", "as EngineConfig says")
    return {"model": theirs.pop("model"), **theirs}


def _default(row: PeerOption, rows: dict[str, PeerOption]) -> Any:
    """The value of an option that is not given; None if only giving it has a meaning."""
    if row.effect is Effect.REFUSED:
        return False if row.kind == "flag" else None
    if row.effect is Effect.HARMLESS:
        if row.kind == "flag":
            return False if False in row.same or row.tunes else None
        return row.same[0] if row.same and row.kind != "json" else None
    if row.effect is Effect.ACTS:
        return _OURS[row.name].default if row.name in _OURS else None
    shares = [other for other in rows.values() if other.becomes == row.becomes]
    if row.convert or row.values or len(shares) > 1 or row.becomes not in _OURS:
        return None
    found = _OURS[row.becomes].default
    return found if isinstance(found, bool | int | float) else None


_ROWS = _rows()


class _EngineArgs:
    """The methods of `EngineArgs`."""

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each field to a parser."""
        group = parser.add_argument_group("engine options")
        for entry in dataclasses.fields(cls):  # type: ignore[arg-type]
            _add_flag(group, _ROWS[entry.name], entry.default)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """From a parser's result, which may contain other things too."""
        names = [entry.name for entry in dataclasses.fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})

    def keywords(self) -> dict[str, Any]:
        """As keywords of `LLM`."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}  # type: ignore[arg-type]

    def create_engine_config(self, usage_context: object = None) -> EngineConfig:
        """The checked configuration of an engine. Raises ConfigError for unsupported options. Usage is not
        tracked, so its context is unused."""
        given = self.keywords()
        return engine_config(given.pop("model"), given)


def _add_flag(group: Any, row: PeerOption, default: Any) -> None:
    flags = row.flags if row.name != "quantization" else (row.flags[0], "-q")
    text = row.text.replace("%", "%%")
    details: dict[str, Any] = {"default": default, "dest": row.name, "help": text}
    if row.kind == "flag":
        details["action"] = argparse.BooleanOptionalAction
    else:
        details |= {"type": _typed(row), "metavar": row.kind.upper()}
        if row.kind in ("ints", "texts"):
            details["action"], details["nargs"] = _Joined, "+"
    group.add_argument(*flags, **details)


class _Joined(argparse.Action):
    """Collects what follows a flag into one list, separated by spaces or commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, [each for value in values for each in value])


def _typed(row: PeerOption) -> Any:
    def read(text: str) -> Any:
        try:
            return parsed(row, row.flags[0], [text])
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    read.__name__ = row.kind
    return read


if TYPE_CHECKING:

    class EngineArgs(_EngineArgs):
        """Options of an engine under vLLM's names."""

        def __init__(self, model: str | None = None, **options: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    class AsyncEngineArgs(EngineArgs):
        """The same for `AsyncLLM`."""

else:
    EngineArgs = dataclasses.make_dataclass(
        "EngineArgs",
        [(name, Any, dataclasses.field(default=_default(row, _ROWS))) for name, row in _ROWS.items()],
        bases=(_EngineArgs,),
        namespace={"__doc__": "Options of an engine under vLLM's names.", "__module__": __name__},
    )
    AsyncEngineArgs = type(
        "AsyncEngineArgs", (EngineArgs,), {"__doc__": "The same for `AsyncLLM`.", "__module__": __name__}
    )
