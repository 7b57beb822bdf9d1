"""Values as typed on a command line: numbers as 4k or 4K, lists with spaces or commas, JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ostinato.graphs.errors import ConfigError

from .option import PeerOption

_SCALES = {"k": 1000, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_TRUE, _FALSE = ("true", "1", "yes"), ("false", "0", "no")


def parsed(row: PeerOption, flag: str, values: Sequence[str]) -> Any:
    """The value of an option, from the words after its flag. Raises ConfigError if they do not fit its
    type."""
    text = values[0]
    try:
        match row.kind:
            case "int":
                return text if text == "auto" else _integer(text)
            case "float":
                return float(text)
            case "json":
                return _json(text)
            case "ints":
                return tuple(_integer(part) for value in values for part in _listed(value))
            case "texts":
                return tuple(values)
    except ValueError:
        what = {"int": "a whole number", "float": "a number", "json": "JSON", "ints": "a list of numbers"}
        raise ConfigError(f"{flag}: {' '.join(values)!r} is not {what[row.kind]}") from None
    return text


def _json(text: str) -> Any:
    """Parse JSON; a bare word, as after -cc.cudagraph_mode=, is a string."""
    is_word = re.fullmatch(r"[A-Za-z_][\w.]*", text) and text not in ("null", "true", "false")
    return text if is_word else json.loads(text)


def _integer(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG])", text)
    return int(text) if found is None else int(float(found[1]) * _SCALES[found[2]])


def _listed(text: str) -> list[str]:
    return [part for part in re.split(r"[\s,]+", text.strip("[] ")) if part]


def boolean(flag: str, text: str) -> bool:
    """The truth value of what follows a flag."""
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ConfigError(f"{flag} must be true or false, not {text!r}")
    return text.lower() in _TRUE
