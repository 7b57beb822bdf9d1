"""How much a grammar may take."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SPECIFICATION_BYTES = 262_144
"""Bytes of a schema, expression or grammar."""
MAX_NESTING = 200
"""Levels of objects in a schema, of brackets in an expression or grammar."""
MAX_REPETITIONS = 1_000_000
"""How often something may be repeated, repetitions inside repetitions multiplied."""


@dataclass(frozen=True)
class GrammarLimits:
    """Of time, memory and processes; `EngineConfig` has them as options."""

    compile_seconds: float = 10.0
    """A grammar that is not compiled by then is refused."""
    mask_seconds: float = 2.0
    """A grammar that has not said by then which tokens may come next is started anew, and at the second time
    its request fails."""
    memory_mb: int = 512
    """MiB that the process of one grammar may take."""
    processes: int = 64
    """Different grammars in use at the same time; requests with further ones wait."""
    compiling: int = 8
    """Grammars compiled at the same time."""
    idle_mb: int = 256
    """MiB that grammars which nobody uses may take together, to be there when they are asked for again."""
