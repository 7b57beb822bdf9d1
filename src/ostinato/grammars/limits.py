"""How much time, memory and size a grammar may take."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SPECIFICATION_BYTES = 262_144
"""Maximum size of a schema, expression or grammar, in bytes."""
MAX_NESTING = 200
"""Maximum nesting of objects in a schema, or of brackets in an expression or grammar."""
MAX_REPETITIONS = 1_000_000
"""Maximum repetitions of a part; nested repetitions are multiplied."""


@dataclass(frozen=True)
class GrammarLimits:
    """Limits on time, memory and processes; `EngineConfig` has them as options."""

    compile_seconds: float = 10.0
    """A grammar that is not compiled in this time is refused."""
    mask_seconds: float = 2.0
    """A grammar that takes longer to say which tokens may come next is restarted; the second time, its
    request fails."""
    memory_mb: int = 512
    """Maximum memory of the process of one grammar, in MiB."""
    processes: int = 64
    """Maximum number of different grammars in use at the same time; requests with further ones wait."""
    compiling: int = 8
    """Maximum number of grammars compiled at the same time."""
    idle_mb: int = 256
    """Maximum memory of all unused grammars together, in MiB; they are kept for later requests."""
