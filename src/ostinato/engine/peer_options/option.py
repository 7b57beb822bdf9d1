"""One option of a peer: how it is written, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ostinato.graphs.errors import ConfigError

Converted = Mapping[str, Any]
"""Options of ours with their values."""


class Fragment(dict[str, Any]):
    """A part of an option of ours that several of theirs make together."""

    def __init__(self, parts: Mapping[str, Any], usual: Mapping[str, Any] | None = None) -> None:
        """`usual`: what goes for keys that nobody gives."""
        super().__init__(parts)
        self.usual = dict(usual or {})

    def joined(self, other: Fragment) -> Fragment | None:
        """With another one; None if both give a key, and not the same value."""
        if any(self[key] != other[key] for key in self.keys() & other.keys()):
            return None
        return Fragment({**self, **other}, {**self.usual, **other.usual})

    def whole(self) -> dict[str, Any]:
        """When all are together."""
        return {**self.usual, **self}


class Effect(StrEnum):
    """What becomes of an option."""

    ACTS = "acts"
    """It is ours too, and means the same."""
    MAPPED = "mapped"
    """It becomes another one of ours."""
    HARMLESS = "harmless"
    """It changes nothing here, and nobody who gives it gets something else than asked for."""
    REFUSED = "refused"
    """What it asks for does not exist here."""


@dataclass(frozen=True)
class PeerOption:
    """A row of the table. Options of the same name and meaning in both peers have one row."""

    name: str
    """As a keyword; the flag is the same with dashes."""
    peers: tuple[str, ...]
    """vllm, sglang."""
    kind: str
    """How a value is written: flag, int, float, text, json, ints, texts."""
    effect: Effect
    text: str
    """What it does here, or what to use instead."""
    example: str
    """A value as people write it on a command line; empty for a flag."""
    becomes: str | None = None
    """The option of ours that gets the value."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Values that are called something else here."""
    same: tuple[Any, ...] = ()
    """Of a harmless option: values that are what happens here anyway."""
    tunes: bool = False
    """Of a harmless option: whether any other value is accepted, with a word, since results do not depend
    on it."""
    convert: Callable[[Any], Converted] | None = None
    """Makes options of ours of a value, where a name and `values` do not say it."""
    shorts: tuple[str, ...] = ()
    """Other ways to write the flag, dashes included."""
    along: str = ""
    """What people write beside it on a command line, where it says nothing alone."""
    is_servers: bool = False
    """Whether it is about the server, and no keyword of `LLM`."""

    @property
    def flags(self) -> tuple[str, ...]:
        """All ways to write it on a command line."""
        return (f"--{self.name.replace('_', '-')}", *self.shorts)

    @property
    def stops_the_start(self) -> bool:
        """Whether even its usual value is refused."""
        return self.effect is Effect.REFUSED

    def ours(self, value: Any, spelled: str) -> tuple[Converted, str | None]:
        """Options of ours for a value, and a word to the user; ConfigError if it cannot be had.

        `spelled`: what the user called it. None, False and nothing at all ask for nothing.
        """
        if value is None:
            return {}, None
        match self.effect:
            case Effect.REFUSED:
                if value in (False, "", (), [], {}):
                    return {}, None
                raise ConfigError(f"{spelled} is not supported: {self.text}")
            case Effect.HARMLESS:
                return {}, self._word(value, spelled)
        if self.convert is not None:
            return self.convert(value), None
        found = self.values.get(value, value) if isinstance(value, str | int | float) else value
        return {self.becomes or self.name: found}, None

    def _word(self, value: Any, spelled: str) -> str | None:
        if value in self.same:
            return None
        if not self.tunes:
            known = " or ".join(map(str, self.same))
            raise ConfigError(f"{spelled} can only be {known}, not {value!r}: {self.text}")
        return f"{spelled} has no effect: {self.text}"


def acts(name: str, peers: str, kind: str, example: str, text: str, **details: Any) -> PeerOption:
    """A row for an option that is ours too."""
    return PeerOption(name, tuple(peers.split()), kind, Effect.ACTS, text, example, **details)


def mapped(
    name: str, peers: str, kind: str, example: str, becomes: str | None, text: str, **details: Any
) -> PeerOption:
    """A row for an option that is called something else here."""
    known = tuple(peers.split())
    return PeerOption(name, known, kind, Effect.MAPPED, text, example, becomes=becomes, **details)


def harmless(name: str, peers: str, kind: str, example: str, text: str, **details: Any) -> PeerOption:
    """A row for an option that changes nothing here: `same` values, or any where it `tunes`."""
    return PeerOption(name, tuple(peers.split()), kind, Effect.HARMLESS, text, example, **details)


def refused(name: str, peers: str, kind: str, example: str, text: str, **details: Any) -> PeerOption:
    """A row for an option that does not exist here; the text says what to use instead."""
    return PeerOption(name, tuple(peers.split()), kind, Effect.REFUSED, text, example, **details)
