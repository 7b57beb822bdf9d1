"""Translates command lines written for vLLM and SGLang into those of Ostinato.

The table in `engine/peer_options` maps their flags to ours. Lists may be written with spaces or commas, names
with dashes or underscores, numbers as 4k or 4K.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.engine.peer_options.option import PeerOption
from ostinato.engine.peer_options.translation import BY_FLAG, translated
from ostinato.engine.peer_options.typed_values import boolean, parsed
from ostinato.graphs.errors import ConfigError

_NUMBERS = re.compile(r"\[?[\d\s,]+\]?")


@dataclass(frozen=True)
class OwnFlag:
    """A flag of the command itself."""

    takes_value: bool = True
    is_numbers: bool = False
    """Whether its value is a list of numbers in one argument: 1,2,4."""
    may_repeat: bool = False
    """Whether it may be repeated, with one value each time."""


def rewritten(arguments: Sequence[str], own: Mapping[str, OwnFlag], *, for_server: bool = False) -> list[str]:
    """The same command line in flags of `own`. ConfigError for a peer's flag that is not supported."""
    reader = _Reader(arguments, own, names_model=for_server)
    reader.read()
    found = translated(reader.theirs, for_server=for_server, spelled=reader.spelled)
    for name, value in found.items():
        flag = f"--{name.replace('_', '-')}"
        if flag not in own:
            raise ConfigError(f"{flag} is not an option of this command")
        if flag in reader.own_given:
            names = [each for each in reader.spelled.values() if each != flag]
            raise ConfigError(f"{flag} was given twice, once as {' or '.join(names)}; give it once")
        reader.rest[reader.insert_at : reader.insert_at] = _written(flag, value)
    return reader.rest


class _Reader:
    """Separates the command's own arguments from those of a peer."""

    def __init__(self, arguments: Sequence[str], own: Mapping[str, OwnFlag], *, names_model: bool) -> None:
        """`names_model`: whether the positional argument is a model, which a flag may name too."""
        self._words = list(arguments)
        self._own = own
        self._model_flags = ("--model", "--model-path") if names_model else ()
        self._has_subject = False
        """Whether the positional argument has been seen, so that a list cannot swallow it."""
        self.rest: list[str] = []
        self.insert_at = 0
        """Where flags can be inserted: before a lone `--`."""
        self.own_given: set[str] = set()
        self.theirs: dict[str, Any] = {}
        self.spelled: dict[str, str] = {}

    def read(self) -> None:
        while self._words:
            word = self._words.pop(0)
            if word == "--":
                self.insert_at = len(self.rest)
                self.rest += [word, *self._words]
                return
            if _is_flag(word):
                self._take(word)
            else:
                self._has_subject = True
                self.rest.append(word)
        self.insert_at = len(self.rest)

    def _take(self, word: str) -> None:
        flag, given = _apart(word)
        self._has_subject |= flag in self._model_flags
        row, asked, key = _row(flag)
        own = self._own.get(flag)
        if row is not None and (own is None or row.convert is not None or row.values):
            self._take_theirs(row, flag, asked, key, given)
            return
        if own is not None:
            self.own_given.add(flag.replace("--no-", "--", 1))
        if own is not None and own.takes_value:
            values = self._own_values(own, given)
            self.rest += [f"{flag}={value}" for value in values] or [flag]
        else:
            self.rest.append(word if own is None else flag if given is None else f"{flag}={given}")

    def _take_theirs(
        self, row: PeerOption, flag: str, asked: bool, key: str | None, given: str | None
    ) -> None:
        if row.kind == "flag":
            value: Any = asked if given is None else boolean(flag, given) == asked
        else:
            values = [given] if given is not None else self._following(row.kind)
            if not values:
                raise ConfigError(f"{flag} needs a value")
            value = parsed(row, flag, values)
        if key is not None:
            value = {**self.theirs.get(row.name, {}), key: value}
        self.theirs[row.name], self.spelled[row.name] = value, flag

    def _own_values(self, own: OwnFlag, given: str | None) -> list[str]:
        if given is not None:
            return [given]
        if own.is_numbers:
            numbers = self._following("ints")
            return [",".join(numbers)] if numbers else self._following("text")
        return self._following("texts" if own.may_repeat else "text")

    def _following(self, kind: str) -> list[str]:
        """The values of a flag: one word, or as many as its kind takes."""
        values: list[str] = []
        while self._words and not _is_flag(self._words[0]):
            many = kind == "texts" and self._has_subject
            if kind == "ints" and not _NUMBERS.fullmatch(self._words[0]):
                break
            if values and not many and kind != "ints":
                break
            values.append(self._words.pop(0))
        return values


def _is_flag(word: str) -> bool:
    """Whether a word is a flag: not a negative number, nor a lone dash, which means standard input."""
    return len(word) > 1 and word[0] == "-" and not re.fullmatch(r"-\.?\d.*", word)


def _apart(word: str) -> tuple[str, str | None]:
    """Split one word into flag and value; names may have underscores."""
    if found := re.fullmatch(r"(-O)(\d)", word):
        return found[1], found[2]
    flag, equals, given = word.partition("=")
    if flag.startswith("--"):
        flag = flag.replace("_", "-")
    return flag, given if equals else None


def _row(flag: str) -> tuple[PeerOption | None, bool, str | None]:
    """The row of a peer's flag, whether it is turned on or off, and the key after a dot."""
    if flag in BY_FLAG:
        return BY_FLAG[flag], True, None
    plain = BY_FLAG.get("--" + flag.removeprefix("--no-"))
    if flag.startswith("--no-") and plain is not None and plain.kind == "flag":
        return plain, False, None
    name, dot, key = flag.partition(".")
    row = BY_FLAG.get(name)
    if dot and row is not None and row.kind == "json":
        return row, True, key.replace("-", "_")
    return None, True, None


def _written(flag: str, value: Any) -> list[str]:
    """One of our values as command line arguments."""
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, Mapping):
        return [f"{flag}={json.dumps(value)}"]
    if isinstance(value, tuple) and all(isinstance(part, str) for part in value):
        return [f"{flag}={part}" for part in value]
    if isinstance(value, tuple):
        return [f"{flag}={','.join(map(str, value))}"]
    return [f"{flag}={value}"]
