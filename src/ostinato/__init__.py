"""Ostinato: record the GPU work of a model step once, replay it for every token."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import graphs as graphs  # does not load torch until one of its names is used
from .engine.vllm_api.module_paths import install

# Type checkers read imports, not the table below; `X as X` tells them that X is public.
if TYPE_CHECKING:  # isort: off
    from .engine.adapters.lora_request import LoRARequest as LoRARequest
    from .engine.async_llm import AsyncLLM as AsyncLLM, AsyncLLMEngine as AsyncLLMEngine
    from .engine.config import EngineConfig as EngineConfig
    from .engine.llm import LLM as LLM
    from .engine.pooling_outputs import (
        ClassificationOutput as ClassificationOutput,
        ClassificationRequestOutput as ClassificationRequestOutput,
        EmbeddingOutput as EmbeddingOutput,
        EmbeddingRequestOutput as EmbeddingRequestOutput,
        PoolingOutput as PoolingOutput,
        PoolingRequestOutput as PoolingRequestOutput,
        ScoringOutput as ScoringOutput,
        ScoringRequestOutput as ScoringRequestOutput,
    )
    from .engine.outputs import CompletionOutput as CompletionOutput, RequestOutput as RequestOutput
    from .engine.parameters.sampling_params import (
        BeamSearchParams as BeamSearchParams,
        RequestError as RequestError,
        RequestOutputKind as RequestOutputKind,
        SamplingParams as SamplingParams,
        StructuredOutputs as StructuredOutputs,
    )
    from .engine.vllm_api.engine_args import AsyncEngineArgs as AsyncEngineArgs, EngineArgs as EngineArgs
    from .engine.vllm_api.llm_engine import LLMEngine as LLMEngine
    from .engine.vllm_api.pooling_params import PoolingParams as PoolingParams
    from .engine.vllm_api.prompts import (
        PromptType as PromptType,
        TextPrompt as TextPrompt,
        TokensPrompt as TokensPrompt,
    )
    from .graphs import *  # noqa: F403

__version__ = "0.1.0"

_ENGINE = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "AsyncLLMEngine": "async_llm",
    "LoRARequest": "adapters.lora_request",
    "SamplingParams": "parameters.sampling_params",
    "StructuredOutputs": "parameters.sampling_params",
    "RequestError": "parameters.sampling_params",
    "BeamSearchParams": "parameters.sampling_params",
    "RequestOutputKind": "parameters.sampling_params",
    "EngineConfig": "config",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    **dict.fromkeys(
        (
            *("PoolingRequestOutput", "PoolingOutput", "EmbeddingRequestOutput", "EmbeddingOutput"),
            *("ClassificationRequestOutput", "ClassificationOutput"),
            *("ScoringRequestOutput", "ScoringOutput"),
        ),
        "pooling_outputs",
    ),
    "EngineArgs": "vllm_api.engine_args",
    "AsyncEngineArgs": "vllm_api.engine_args",
    "LLMEngine": "vllm_api.llm_engine",
    "PoolingParams": "vllm_api.pooling_params",
    "PromptType": "vllm_api.prompts",
    "TextPrompt": "vllm_api.prompts",
    "TokensPrompt": "vllm_api.prompts",
}
_HOMES = dict.fromkeys(graphs.__all__, "graphs") | {
    name: f"engine.{module}" for name, module in _ENGINE.items()
}

__all__ = sorted(["graphs", *_HOMES])

install(__name__)


def __getattr__(name: str) -> Any:
    """Import public names on first use, because torch takes seconds to load."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
