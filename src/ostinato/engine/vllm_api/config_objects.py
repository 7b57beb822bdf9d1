"""Groups of options as objects, as vLLM's scripts make them: `LLM(profiler_config=ProfilerConfig(...))`.

An object is only a mapping of what was given. What becomes of it is decided by the row of the option that it
is given to (`peer_options`), exactly as for a dictionary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, IntEnum
from typing import Any


class OptionGroup(Mapping[str, Any]):
    """Options under one name; those not given are not there."""

    def __init__(self, **options: Any) -> None:
        self._options = {
            name: value.name if isinstance(value, CUDAGraphMode) else value for name, value in options.items()
        }

    def __getitem__(self, name: str) -> Any:
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._options:
            raise AttributeError(f"{type(self).__name__} was not given {name}")
        return self._options[name]

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        return f"{type(self).__name__}({given})"


class CompilationConfig(OptionGroup):
    """Graphs; what is said about the compiler changes nothing."""


class StructuredOutputsConfig(OptionGroup):
    """Who compiles grammars."""


class ProfilerConfig(OptionGroup):
    """Where `start_profile` leaves its traces."""


class PoolerConfig(OptionGroup):
    """How a prompt becomes a vector."""


class AttentionConfig(OptionGroup):
    """Which kernels attend."""


class WeightTransferConfig(OptionGroup):
    """How a trainer's weights come."""


class CUDAGraphMode(Enum):
    """vLLM's names of modes."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"
    FULL_DECODE_ONLY = "full-decode-only"
    FULL_AND_PIECEWISE = "full-and-piecewise"


class CompilationMode(IntEnum):
    """How much torch.compile does with vLLM; here it does nothing."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CompilationLevel(IntEnum):
    """The older name of `CompilationMode`."""

    NO_COMPILATION = 0
    DYNAMO_AS_IS = 1
    DYNAMO_ONCE = 2
    PIECEWISE = 3
