"""Ostinato: record the GPU work of a model step once, replay it for every token."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import graphs as graphs  # needs no torch until something of it is used

# Type checkers read imports, not the table below; `X as X` tells them that X is public.
if TYPE_CHECKING:  # isort: off
    from .engine.async_llm import AsyncLLM as AsyncLLM
    from .engine.config import EngineConfig as EngineConfig
    from .engine.llm import LLM as LLM
    from .engine.outputs import CompletionOutput as CompletionOutput, RequestOutput as RequestOutput
    from .engine.sampling_params import (
        RequestError as RequestError,
        SamplingParams as SamplingParams,
        StructuredOutputs as StructuredOutputs,
    )
    from .graphs import *  # noqa: F403

__version__ = "0.1.0"

_ENGINE = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "SamplingParams": "sampling_params",
    "StructuredOutputs": "sampling_params",
    "RequestError": "sampling_params",
    "EngineConfig": "config",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
}
_HOMES = dict.fromkeys(graphs.__all__, "graphs") | {
    name: f"engine.{module}" for name, module in _ENGINE.items()
}

__all__ = sorted(["graphs", *_HOMES])


def __getattr__(name: str) -> Any:
    """The public names, imported when first asked for: torch takes seconds to load."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
