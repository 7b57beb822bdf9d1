"""Groups of options as objects, as in vLLM's scripts: `LLM(profiler_config=ProfilerConfig(...))`.

An object is only a mapping of the given options. The row of the option that it is passed to (`peer_options`)
decides what they do, exactly as for a dictionary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum, IntEnum
from typing import Any


class OptionGroup(Mapping[str, Any]):
    """Options under one name; only those that were given."""

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
    """Graph options; options for the compiler have no effect."""


class StructuredOutputsConfig(OptionGroup):
    """The backend that compiles grammars."""


class ProfilerConfig(OptionGroup):
    """Where `start_profile` writes its traces."""


class PoolerConfig(OptionGroup):
    """How a prompt is turned into a vector."""


class AttentionConfig(OptionGroup):
    """Which attention kernels to use."""


class WeightTransferConfig(OptionGroup):
    """How a trainer's weights arrive."""


class CUDAGraphMode(Enum):
    """vLLM's names of graph modes."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"
    FULL_DECODE_ONLY = "full-decode-only"
    FULL_AND_PIECEWISE = "full-and-piecewise"


class CompilationMode(IntEnum):
    """How much torch.compile does in vLLM; no effect here."""

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
