"""Conversions of peers' option values that are more than a change of name."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
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
    "cudagraph_specialize_lora": "cudagraph_specialize_lora",
}
_COMPILER_KEYS = frozenset(
    {"mode", "level", "backend", "use_inductor", "inductor_compile_config", "custom_ops", "pass_config"}
    | {"cache_dir", "compile_sizes", "splitting_ops", "debug_dump_path", "use_inductor_graph_partition"}
)
"""Keys about torch.compile, which the engine does not use."""


def compilation_config(value: Any) -> Converted:
    """vLLM's: keys about graphs are used; keys about the compiler have no effect on results."""
    if isinstance(value, int):
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"compilation_config must be an object or a level, not {value!r}")
    found: dict[str, Any] = {}
    for key, given in value.items():
        if key in _GRAPH_KEYS:
            if given is not None:
                given = getattr(given, "name", given)  # of an enum member
                found[_GRAPH_KEYS[key]] = tuple(given) if isinstance(given, list) else given
        elif key not in _COMPILER_KEYS:
            known = ", ".join(_GRAPH_KEYS)
            raise ConfigError(f"compilation_config: {key!r} is not supported; supported: {known}")
    return found


def structured_outputs_config(value: Any) -> Converted:
    """The backend that compiles grammars: xgrammar is the only one."""
    for key, given in _group("structured_outputs_config", value).items():
        if key != "backend" or given not in ("auto", "xgrammar"):
            if given in (None, False, ""):
                continue
            raise ConfigError(
                f"structured_outputs_config: {key}={given!r} is not supported; the only backend is xgrammar"
            )
    return {}


_PROFILER_KEYS = {
    "torch_profiler_dir": "profile_dir",
    "delay_iterations": "profile_delay",
    "max_iterations": "profile_steps",
}


def profiler_config(value: Any) -> Converted:
    """vLLM's: a folder for the traces, and the numbers of steps to skip and to record."""
    found: dict[str, Any] = {}
    for key, given in _group("profiler_config", value).items():
        if key in _PROFILER_KEYS:
            found[_PROFILER_KEYS[key]] = given
        elif given not in (None, False) and (key, given) != ("profiler", "torch"):
            known = ", ".join(_PROFILER_KEYS)
            raise ConfigError(f"profiler_config: {key}={given!r} is not supported: use only {known}")
    return found


def pooler_config(value: Any) -> Converted:
    """vLLM's: how a prompt is turned into a vector."""
    found: dict[str, Any] = {}
    for key, given in _group("pooler_config", value).items():
        if key in ("pooling_type", "seq_pooling_type") and str(given).upper() in ("LAST", "MEAN"):
            found["pooling"] = str(given).lower()
        elif given is not None and (key, given) not in (("normalize", True), ("use_activation", True)):
            raise ConfigError(
                f"pooler_config: {key}={given!r} is not supported; pooling_type can be LAST or MEAN, and "
                "the rest is set in PoolingParams"
            )
    return found


def hf_overrides(value: Any) -> Converted:
    """Fields of config.json; a function that changes them, as in vLLM, is refused."""
    if callable(value):
        raise ConfigError("hf_overrides must be a mapping of fields of config.json, not a function")
    if not isinstance(value, Mapping):
        raise ConfigError(f"hf_overrides must be a mapping of fields of config.json, not {value!r}")
    return {"hf_overrides": dict(value)} if value else {}


def lora_modules(value: Any) -> Converted:
    """Adapters to load: a list of name=directory, JSON strings or objects, or a mapping of name to
    directory."""
    if isinstance(value, Mapping):
        listed = [{"name": name, "path": path} for name, path in value.items()]
    elif isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"lora_modules must be a list of name=directory, not {value!r}")
    else:
        listed = list(value)
    texts = [json.dumps(entry) if isinstance(entry, Mapping) else str(entry) for entry in listed]
    return {"lora_modules": tuple(texts)} if texts else {}


def attention_config(value: Any) -> Converted:
    """vLLM's: which attention kernels to use."""
    found: dict[str, Any] = {}
    for key, given in _group("attention_config", value).items():
        if key == "backend" and given is not None:
            found |= attention_backend(str(getattr(given, "name", given)))
        elif given is not None:
            raise ConfigError(f"attention_config: {key} is not supported; the only key is backend")
    return found


def _group(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be an object, not {value!r}")
    return value


def attention_backend(value: str) -> Converted:
    """Names of other libraries' kernels mean auto, with a warning: Ostinato's own compute the same."""
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
    """As many pages as hold this many tokens, plus page 0."""
    return {"num_pages": -(-value // PAGE_TOKENS) + 1}


def gpu_by_number(value: int) -> Converted:
    """The GPU to use."""
    return {"device": f"cuda:{value}"}


def when_true(name: str, value: Any) -> Any:
    """A conversion for a flag: sets an option of ours if the flag is given, otherwise nothing."""
    return lambda given: {name: value} if given else {}
