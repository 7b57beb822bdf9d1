"""Ostinato: record the GPU work of a model step once, replay it for every token."""

from importlib import import_module
from typing import Any

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


def __getattr__(name: str) -> Any:
    """The public names, imported when first asked for: torch takes seconds to load."""
    if name in _ENGINE:
        return getattr(import_module(f".engine.{_ENGINE[name]}", __name__), name)
    # Not `from . import graphs`: that asks for an attribute `graphs` first, and so comes back here.
    graphs = import_module(".graphs", __name__)
    if name in graphs.__all__:
        return getattr(graphs, name)
    raise AttributeError(f"module 'ostinato' has no attribute {name!r}")
