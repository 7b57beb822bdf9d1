"""The table of all peer options, and the translation of peers' options to Ostinato's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ostinato.graphs.errors import ConfigError

from .engine_rows import ENGINE_ROWS
from .llm_rows import LLM_ROWS
from .option import Fragment, PeerOption
from .server_rows import SERVER_ROWS

logger = logging.getLogger("ostinato.engine")

ROWS: tuple[PeerOption, ...] = ENGINE_ROWS + SERVER_ROWS

BY_NAME = {row.name: row for row in ROWS}

OF_LLM = {row.name: row for row in (*ENGINE_ROWS, *LLM_ROWS)}
"""By keyword of `LLM`."""

BY_FLAG = {flag: row for row in reversed(ROWS) for flag in row.flags}
"""By flag on a command line; --tensor-parallel-size is vLLM's row, as the name is vLLM's."""


def translated(
    options: Mapping[str, Any], *, for_server: bool = False, spelled: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Options in Ostinato's names, from options in Ostinato's, vLLM's or SGLang's.

    A name that no peer has is left as it is. A value with no effect is left out, with a warning if the user
    may have expected one. Raises ConfigError, naming the option, for an unsupported value, and for two names
    of one option that disagree. `for_server`: whether to accept options of the server too. `spelled`: how the
    user wrote a name, if differently.
    """
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value in options.items():
        shown = (spelled or {}).get(name, name)
        for key, converted in _ours(name, value, shown, for_server).items():
            if key in sources:
                converted = _together(found[key], converted, sources[key], shown)
            found[key], sources[key] = converted, shown
    return {key: value.whole() if isinstance(value, Fragment) else value for key, value in found.items()}


def _together(before: Any, given: Any, first: str, second: str) -> Any:
    """The combined value of two names for one of our options. Raises ConfigError if they contradict."""
    if isinstance(before, Fragment) and isinstance(given, Fragment):
        joined = before.joined(given)
        if joined is not None:
            return joined
    elif before == given:
        return given
    raise ConfigError(f"give {first} or {second}, not both: they mean the same")


def _ours(name: str, value: Any, shown: str, for_server: bool) -> Mapping[str, Any]:
    row = BY_NAME.get(name) if for_server else OF_LLM.get(name, BY_NAME.get(name))
    if row is None:
        return {name: value}
    if row.is_servers and not for_server:
        if value is None:
            return {}
        raise ConfigError(f"{shown} is an option of the server only: use it with `ostinato serve`")
    converted, word = row.ours(value, shown)
    if word is not None:
        logger.warning("%s", word)
    return converted
