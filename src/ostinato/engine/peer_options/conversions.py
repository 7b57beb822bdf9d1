"""Values of peers' options that are more than another name for one of ours."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ostinato.graphs.errors import ConfigError

from .option import Converted

logger = logging.getLogger("ostinato.engine")

_BACKENDS = {"triton_attn": "triton", "triton_attn_vllm_v1": "triton", "torch_sdpa": "torch"}
_BACKENDS |= {"torch_native": "torch"}
_OTHER_KERNELS = frozenset(
    {"flash_attn", "flash_attn_vllm_v1", "flashinfer", "flashinfer_vllm_v1", "flashmla", "fa2", "fa3", "fa4"}
    | {"flex_attention", "xformers", "trtllm_mha", "trtllm_mla", "cutlass_mla"}
)

PAGE_TOKENS = 16
"""Tokens of a KV page."""

_GRAPH_KEYS = {
    "cudagraph_mode": "cuda_graph_mode",
    "cudagraph_capture_sizes": "cudagraph_capture_sizes",
    "max_cudagraph_capture_size": "max_cudagraph_capture_size",
}
_COMPILER_KEYS = frozenset(
    {"mode", "level", "backend", "use_inductor", "inductor_compile_config", "custom_ops", "pass_config"}
    | {"cache_dir", "compile_sizes", "splitting_ops", "debug_dump_path", "use_inductor_graph_partition"}
)
"""About torch.compile, which the engine does not use."""


def compilation_config(value: Any) -> Converted:
    """vLLM's: what it says about graphs; what it says about the compiler changes no result."""
    if isinstance(value, int):
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"compilation_config is an object or a level, not {value!r}")
    found: dict[str, Any] = {}
    for key, given in value.items():
        if key in _GRAPH_KEYS:
            found[_GRAPH_KEYS[key]] = tuple(given) if isinstance(given, list) else given
        elif key not in _COMPILER_KEYS:
            known = ", ".join(_GRAPH_KEYS)
            raise ConfigError(f"compilation_config: {key!r} is not supported; there are {known}")
    return found


def attention_backend(value: str) -> Converted:
    """Another library's kernels compute the same: ours are used, with a word."""
    name = value.lower()
    if name in _BACKENDS:
        return {"attention_backend": _BACKENDS[name]}
    if name in _OTHER_KERNELS:
        logger.warning("attention_backend %s does not exist here: auto is used", value)
        return {"attention_backend": "auto"}
    return {"attention_backend": value}


def max_model_len(value: Any) -> Converted:
    """-1 and auto: as long as the model and the machine allow."""
    return {} if value in (-1, "auto") else {"max_model_len": value}


def chunked_prefill_size(value: Any) -> Converted:
    """SGLang's -1: no chunks."""
    return {"enable_chunked_prefill": False} if value == -1 else {"chunked_prefill_size": value}


def pages_of_tokens(value: int) -> Converted:
    """As many pages as hold so many tokens, and page 0."""
    return {"num_pages": -(-value // PAGE_TOKENS) + 1}


def gpu_by_number(value: int) -> Converted:
    """The GPU to use."""
    return {"device": f"cuda:{value}"}


def when_true(name: str, value: Any) -> Any:
    """A conversion of a flag: set an option of ours if it is given, nothing if it is not."""
    return lambda given: {name: value} if given else {}
