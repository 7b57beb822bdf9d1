"""One peer option: how it is written, and what Ostinato does with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ostinato.graphs.errors import ConfigError

Converted = Mapping[str, Any]
"""Ostinato's options with their values."""


class Fragment(dict[str, Any]):
    """A part of one of Ostinato's options that several peer options set together."""

    def __init__(self, parts: Mapping[str, Any], usual: Mapping[str, Any] | None = None) -> None:
        """`usual`: values of keys that are not given."""
        super().__init__(parts)
        self.usual = dict(usual or {})

    def joined(self, other: Fragment) -> Fragment | None:
        """This and another one combined; None if both give a key different values."""
        if any(self[key] != other[key] for key in self.keys() & other.keys()):
            return None
        return Fragment({**self, **other}, {**self.usual, **other.usual})

    def whole(self) -> dict[str, Any]:
        """The whole, once all parts are joined."""
        return {**self.usual, **self}


class Effect(StrEnum):
    """What Ostinato does with an option."""

    ACTS = "acts"
    """Ostinato has it too, with the same meaning."""
    MAPPED = "mapped"
    """It sets another of Ostinato's options."""
    HARMLESS = "harmless"
    """It has no effect, and the user still gets what the option asks for."""
    REFUSED = "refused"
    """What it asks for does not exist in Ostinato."""


@dataclass(frozen=True)
class PeerOption:
    """A row of the table. Options with the same name and meaning in both peers share one row."""

    name: str
    """As a keyword; the flag is the same with dashes."""
    peers: tuple[str, ...]
    """vllm, sglang."""
    kind: str
    """The type of its value: flag, int, float, text, json, ints, texts."""
    effect: Effect
    text: str
    """What it does here, or what to use instead."""
    example: str
    """A value as people write it on a command line; empty for a flag."""
    becomes: str | None = None
    """The option of Ostinato that gets the value."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Values that have another name in Ostinato."""
    same: tuple[Any, ...] = ()
    """For a harmless option: values that request what happens anyway."""
    tunes: bool = False
    """For a harmless option: whether any other value is accepted too, with a warning, because results do not
    depend on it."""
    convert: Callable[[Any], Converted] | None = None
    """Turns a value into options of Ostinato, if a name and `values` are not enough."""
    shorts: tuple[str, ...] = ()
    """Other ways to write the flag, dashes included."""
    along: str = ""
    """What is written with it on a command line, if it has no meaning alone."""
    is_servers: bool = False
    """Whether it is for the server only, and not a keyword of `LLM`."""

    @property
    def flags(self) -> tuple[str, ...]:
        """All ways to write it on a command line."""
        return (f"--{self.name.replace('_', '-')}", *self.shorts)

    @property
    def stops_the_start(self) -> bool:
        """Whether even its usual value is refused."""
        return self.effect is Effect.REFUSED

    def ours(self, value: Any, spelled: str) -> tuple[Converted, str | None]:
        """Options of Ostinato for a value, and a message for the user. Raises ConfigError if unsupported.

        `spelled`: the name that the user wrote. None, False and empty values request nothing.
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
    """A row for an option that Ostinato has too."""
    return PeerOption(name, tuple(peers.split()), kind, Effect.ACTS, text, example, **details)


def mapped(
    name: str, peers: str, kind: str, example: str, becomes: str | None, text: str, **details: Any
) -> PeerOption:
    """A row for an option that has another name in Ostinato."""
    known = tuple(peers.split())
    return PeerOption(name, known, kind, Effect.MAPPED, text, example, becomes=becomes, **details)


def harmless(name: str, peers: str, kind: str, example: str, text: str, **details: Any) -> PeerOption:
    """A row for an option that has no effect: its `same` values, or any value if it `tunes`."""
    return PeerOption(name, tuple(peers.split()), kind, Effect.HARMLESS, text, example, **details)


def refused(name: str, peers: str, kind: str, example: str, text: str, **details: Any) -> PeerOption:
    """A row for an option that does not exist in Ostinato; the text says what to use instead."""
    return PeerOption(name, tuple(peers.split()), kind, Effect.REFUSED, text, example, **details)
