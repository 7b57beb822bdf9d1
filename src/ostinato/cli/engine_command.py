"""A command with many flags: grouped help that fits 80 columns, and flags of vLLM and SGLang."""

from __future__ import annotations

import textwrap
from typing import Any

from typer.core import TyperCommand

from .dataclass_flags import NUMBERS
from .peer_flags import OwnFlag, rewritten

HELP_INDENT = 4
"""Each flag has its own line with the help below it: names are long and must not be cut."""


class EngineCommand(TyperCommand):
    """Base of all commands that start an engine."""

    for_server = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate flags of vLLM and SGLang before anything else sees them."""
        return super().parse_args(ctx, rewritten(args, self._own_flags(), for_server=self.for_server))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """One section per group, in the order of the parameters."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                name = getattr(param, "rich_help_panel", None) or _kind(param)
                sections.setdefault(name, []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                for flag, text in records:
                    _write(formatter, flag, text)

    def _own_flags(self) -> dict[str, OwnFlag]:
        own: dict[str, OwnFlag] = {}
        for param in self.params:
            if _kind(param) == "Arguments":
                continue
            flag = OwnFlag(
                takes_value=not getattr(param, "is_flag", False),
                is_numbers=param.metavar == NUMBERS,
                may_repeat=bool(getattr(param, "multiple", False)),
            )
            own |= dict.fromkeys((*param.opts, *param.secondary_opts), flag)
        return own | {"-h": OwnFlag(False), "--help": OwnFlag(False)}


class ServerCommand(EngineCommand):
    """Base of commands that also start a server."""

    for_server = True


def _write(formatter: Any, flag: str, text: str) -> None:
    indent = " " * (formatter.current_indent + HELP_INDENT)
    lines = textwrap.wrap(text, formatter.width - len(indent), break_on_hyphens=False)
    formatter.write(" " * formatter.current_indent + flag + "\n")
    formatter.write("".join(f"{indent}{line}\n" for line in lines))


def _kind(param: Any) -> str:
    return "Arguments" if param.param_type_name == "argument" else "Options"
