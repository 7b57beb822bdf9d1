"""Which batches run from which kind of graph, and how the attention backend limits that."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple

from ..errors import ConfigError


class GraphMode(Enum):
    """How steps run, as a pair (decode path, mixed path).

    NONE, PIECEWISE and FULL are also the modes of a single step.
    """

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"
    FULL_DECODE_ONLY = "full-decode-only"
    FULL_AND_PIECEWISE = "full-and-piecewise"

    def __str__(self) -> str:
        return self.value

    @property
    def decode(self) -> GraphMode:
        """What uniform (decode) batches run as: NONE, PIECEWISE or FULL."""
        return _PATHS[self][0]

    @property
    def mixed(self) -> GraphMode:
        """What batches of mixed query lengths run as: NONE, PIECEWISE or FULL."""
        return _PATHS[self][1]

    @property
    def is_runtime(self) -> bool:
        """Whether a single step can run in this mode."""
        return self in (GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL)

    @classmethod
    def parse(cls, text: str | GraphMode) -> GraphMode:
        """The mode with this name; letter case does not matter, and words are joined by '-' or '_'."""
        if isinstance(text, cls):
            return text
        for mode in cls:
            if isinstance(text, str) and text.strip().upper().replace("-", "_") == mode.name:
                return mode
        raise ConfigError(f"unknown graph mode {text!r}; the modes are {', '.join(cls.__members__)}")


_PATHS: dict[GraphMode, tuple[GraphMode, GraphMode]] = {
    GraphMode.NONE: (GraphMode.NONE, GraphMode.NONE),
    GraphMode.PIECEWISE: (GraphMode.PIECEWISE, GraphMode.PIECEWISE),
    GraphMode.FULL: (GraphMode.FULL, GraphMode.FULL),
    GraphMode.FULL_DECODE_ONLY: (GraphMode.FULL, GraphMode.NONE),
    GraphMode.FULL_AND_PIECEWISE: (GraphMode.FULL, GraphMode.PIECEWISE),
}


class Capability(IntEnum):
    """What an attention backend can capture; each level includes the ones below it."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


def needed_capability(query_len: int | None) -> Capability:
    """The lowest capability with which FULL graphs can serve this uniform query length (None: mixed)."""
    if query_len is None:
        return Capability.ALWAYS
    return Capability.UNIFORM_SINGLE_TOKEN_DECODE if query_len == 1 else Capability.UNIFORM_BATCH


class Lowered(NamedTuple):
    """A possible mode, and one sentence on what was lowered and why (None: nothing was)."""

    mode: GraphMode
    explanation: str | None


def lower(mode: GraphMode, capability: Capability, query_len: int = 1) -> Lowered:
    """The nearest mode that an attention backend with this capability can run.

    A path that cannot be FULL becomes PIECEWISE, and no path becomes more than was requested. In one case the
    remaining paths form no mode: FULL_DECODE_ONLY on a backend that cannot capture the decode path becomes
    NONE, not PIECEWISE, because piecewise graphs would also serve mixed batches, which the mode excludes, and
    would cost a token ladder, capture time and memory. The explanation suggests PIECEWISE.
    """
    if query_len < 1:
        raise ConfigError(f"the query length must be at least 1, not {query_len}")
    why: list[str] = []

    def limited(name: str, wanted: GraphMode, need: Capability) -> GraphMode:
        if wanted is GraphMode.FULL and capability < need:
            why.append(
                f"full graphs for {name} need {need.name}, but the attention backend has {capability.name}"
            )
            return GraphMode.PIECEWISE
        return wanted

    decode = limited(f"decode batches of query length {query_len}", mode.decode, needed_capability(query_len))
    mixed = limited("mixed batches", mode.mixed, needed_capability(None))
    if (decode, mixed) == (GraphMode.PIECEWISE, GraphMode.NONE):
        why.append("piecewise graphs would serve mixed batches too (use PIECEWISE if that is wanted)")
        decode = GraphMode.NONE
    possible = next(each for each, paths in _PATHS.items() if paths == (decode, mixed))
    return Lowered(
        possible, f"{mode.name} was lowered to {possible.name}: {'; '.join(why)}." if why else None
    )
