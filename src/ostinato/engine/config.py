"""Engine options. Each field is a keyword of `LLM` and a command-line flag; its docstring is the help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from ostinato.grammars.limits import GrammarLimits
from ostinato.graphs import ConfigError, GraphMode

from .capture_sizes import check_capture_sizes
from .speculating.config import SpeculativeConfig

_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (float, int),
    "tuple[int, ...]": (tuple,),
    "tuple[Any, ...]": (tuple,),
    "tuple[str, ...]": (tuple,),
    "Mapping[str, Any]": (Mapping,),
}
_AT_LEAST_ONE = (
    "max_model_len",
    "max_running_requests",
    "chunked_prefill_size",
    "num_pages",
    "cuda_graph_max_bs",
    "cuda_graph_memory_mb",
    "grammar_memory_mb",
    "grammar_processes",
    "max_loras",
    "max_lora_rank",
    "max_cpu_loras",
)
MAX_LORA_RANK = 256

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")


@dataclass(frozen=True)
class EngineConfig:
    """Options as the user gave them; `resolve` fills in what depends on the model and the machine."""

    model: str | None = None
    """Model to load: a directory, a GGUF file or a hub name; default: SmolLM2-135M-Instruct."""
    dtype: str = "auto"
    """float32, bfloat16 or float16; auto: the model's own type on a GPU, float32 on a CPU."""
    tokenizer: str | None = None
    """Directory or hub name with the tokenizer's files; default: the model's own."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub."""
    download_dir: str | None = None
    """Directory for models downloaded from the hub; default: that of huggingface_hub."""
    hf_overrides: Mapping[str, Any] | None = None
    """Values that take precedence over those in the model's config.json."""
    load_format: str = "auto"
    """auto, or dummy: random weights, from a config.json alone."""
    allow_nonfinite_weights: bool = False
    """Take NaN and infinite weights, at load and in updates, with a warning; otherwise they are refused."""
    device: str = "auto"
    """cuda or cpu; auto: the current GPU if there is one, otherwise the CPU."""
    max_model_len: int | None = None
    """Maximum length of prompt plus output, in tokens; default: the model's own limit, but at most 8192 on a
    GPU and 2048 on a CPU."""
    max_running_requests: int | None = None
    """Maximum number of requests in one step; default: 256 on a GPU, 16 on a CPU."""
    chunked_prefill_size: int | None = None
    """Maximum number of tokens in one step; longer prompts run in chunks. Default: 4096 on a GPU, 128 on a
    CPU."""
    enable_chunked_prefill: bool = True
    """Split prompts over several steps; if off, one step can hold a prompt of max_model_len tokens."""
    target_itl_ms: float | None = None
    """Target for the time between two tokens of a stream, in milliseconds: while streams run, a step takes
    only as many prompt tokens as fit into it. Default: no target, up to chunked_prefill_size tokens."""
    mem_fraction: float = 0.9
    """Fraction of the GPU's memory that weights, KV cache and graphs may use together."""
    num_pages: int | None = None
    """Number of KV cache pages, of 16 tokens each; default: as many as fit."""
    enable_prefix_caching: bool = True
    """Share KV cache pages between requests whose prompts begin alike."""
    enable_cascade_attention: bool = False
    """If all requests of a decode batch share a long prefix, read its KV cache once per step instead of once
    per request. Captures one more graph for each decode batch size."""
    steps_ahead: int | None = None
    """Number of steps launched before the tokens of the previous one are read, 0 or 1. Default: 1 on a GPU, 0
    on a CPU."""
    attention_backend: str = "auto"
    """torch or triton; auto: triton on a GPU."""
    kernel_table: str | None = None
    """File written by `ostinato tune` that chooses the kernels of linear layers; none: no table, built-in
    rules choose. Default: the file that OSTINATO_KERNEL_TABLE names, otherwise the one for this kind of GPU
    in the cache folder, otherwise the package's own."""
    seed: int = 0
    """Seed for requests without a seed of their own."""
    generation_config: str = "auto"
    """Where temperature, top_p, top_k, min_p, repetition_penalty and max_tokens come from if a request leaves
    them out: a folder with a generation_config.json; auto: the model's own; none: neutral values."""
    override_generation_config: Mapping[str, Any] | None = None
    """Values that take precedence over those from generation_config."""
    max_logprobs: int = 20
    """Maximum number of alternatives per token whose log probabilities a request may ask for; -1: the whole
    vocabulary."""
    logprobs_mode: str = "raw_logprobs"
    """Which distribution log probabilities refer to: the model's own (raw_logprobs), or the one that tokens
    are drawn from, after penalties, masks, temperature and filters (processed_logprobs)."""
    logits_processors: tuple[Any, ...] | None = None
    """Classes, or their names as module:Class, that change the logits of a batch before tokens are drawn, by
    vLLM's protocol (docs/engine.md)."""
    grammar_compile_seconds: float = 10.0
    """Time limit, in seconds, for compiling the grammar of a structured output."""
    grammar_mask_seconds: float = 2.0
    """Time limit, in seconds, for a grammar to compute which tokens may come next. A request whose grammar
    exceeds it twice ends with an error; other requests do not wait for it."""
    grammar_memory_mb: int = 512
    """Memory limit, in MiB, of the process that compiles and follows one grammar."""
    grammar_processes: int = 64
    """Maximum number of different grammars in use at the same time, one process each; requests with further
    grammars wait."""
    cuda_graph_mode: str = "auto"
    """Which steps run from graphs: none, piecewise, full, full-decode-only or full-and-piecewise; auto: full
    with triton attention, full-and-piecewise with torch attention."""
    disable_cuda_graph: bool = False
    """Capture no graphs; the same as cuda_graph_mode none."""
    cuda_graph_max_bs: int | None = None
    """Largest captured decode batch, in requests. Default: max_running_requests, which is also the maximum.
    Larger batches run from prefill graphs, or without a graph."""
    cuda_graph_bs: tuple[int, ...] | None = None
    """Decode batch sizes to capture, in requests, instead of the default list."""
    cuda_graph_prefill_tokens: tuple[int, ...] | None = None
    """Prefill sizes to capture, in tokens, instead of the default list up to chunked_prefill_size. Larger
    steps run without a graph; to avoid them, set chunked_prefill_size to the last size."""
    cuda_graph_ladder: str = "auto"
    """Default list of decode batch sizes to capture: sglang, vllm, or dense (1 to 32, then by 32); auto:
    sglang on a GPU, powers of two on a CPU."""
    disable_cuda_graph_padding: bool = False
    """Replay a graph only for batches of exactly its size; other batches run without a graph."""
    enable_cudagraph_gc: bool = False
    """Let Python's garbage collector run during capture."""
    cuda_graph_memory_mb: int | None = None
    """Memory limit of all graphs together, in MiB. Graphs that save the least padding for their bytes are
    dropped. Default: no limit."""
    cuda_graph_debug_log: bool = False
    """Log every graph as it is captured."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """vLLM's list, in tokens. It sets cuda_graph_prefill_tokens and, for sizes up to max_running_requests,
    cuda_graph_bs."""
    max_cudagraph_capture_size: int | None = None
    """vLLM's limit, in tokens, on the sizes in both default lists. Larger steps run without a graph."""
    enable_lora: bool = False
    """Serve LoRA adapters. Captures one more graph for each size."""
    max_loras: int | None = None
    """Maximum number of different adapters in one step, which is the number of slots on the device. Requests
    with further adapters wait. Default: 4, or max_cpu_loras if that is less."""
    max_lora_rank: int = 16
    """Maximum rank of an adapter, at most 256. Every slot has room for this rank."""
    max_cpu_loras: int | None = None
    """Maximum number of adapters kept in host memory, including those on the device. Others are read from
    disk again when a request needs them. Default: max_loras, but at least 8."""
    lora_modules: tuple[str, ...] | None = None
    """Adapters to load at startup, each as name=directory or as a JSON object with name, path and pinned.
    Turns enable_lora on."""
    cudagraph_specialize_lora: bool = True
    """Capture separate graphs for steps without adapters; if off, all steps run from the graphs with
    adapters."""
    enable_sleep_mode: bool = False
    """Allocate weights, KV cache and graph memory so that `sleep` can release them to the device."""
    hostile_wake: bool = False
    """For debugging: at every wake_up, fill all memory with NaNs and large integers before restoring its
    contents. Needs enable_sleep_mode."""
    worker_extension_cls: str | None = None
    """Class, as package.module.Class, whose methods `collective_rpc` can call; see docs/memory.md."""
    weight_transfer_timeout: float = 300.0
    """Seconds to wait for a trainer's process to join a group or a broadcast of weights."""
    speculative_config: Mapping[str, Any] | None = None
    """Speculative decoding: draft tokens and verify several of them per step. Takes vLLM's keys, see
    docs/speculation.md. The output is the same as without it."""
    batch_invariant: bool = False
    """Give each request the same bits regardless of what runs beside it, by using one shape for every step.
    Slower."""

    def __post_init__(self) -> None:
        self._check_types()
        if self.cuda_graph_mode != "auto":
            GraphMode.parse(self.cuda_graph_mode)
        if self.dtype not in ("auto", *DTYPES):
            raise ConfigError(f"unknown dtype {self.dtype!r}: use auto, {', '.join(DTYPES)}")
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError(f"unknown load_format {self.load_format!r}: use auto or dummy")
        if not 0 < self.mem_fraction <= 1:
            raise ConfigError(f"mem_fraction must be in (0, 1], not {self.mem_fraction}")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.target_itl_ms is not None:
            self._check_target_itl(self.target_itl_ms)
        if self.max_logprobs < -1:
            raise ConfigError(f"max_logprobs must be at least 0, or -1 for all, not {self.max_logprobs}")
        if self.logprobs_mode not in LOGPROBS_MODES:
            raise ConfigError(
                f"unknown logprobs_mode {self.logprobs_mode!r}: use {' or '.join(LOGPROBS_MODES)}"
            )
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0, not {self.seed}")
        if self.steps_ahead not in (None, 0, 1):
            raise ConfigError(f"steps_ahead must be 0 or 1, not {self.steps_ahead}")
        for name in ("grammar_compile_seconds", "grammar_mask_seconds", "weight_transfer_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        check_capture_sizes(self)
        self._check_adapters()
        if self.hostile_wake and not self.enable_sleep_mode:
            raise ConfigError("hostile_wake acts only at wake_up: it needs enable_sleep_mode")
        if self.batch_invariant:
            self._check_batch_invariant()
        if self.speculative_config is not None:
            self._check_speculation()

    def _check_target_itl(self, target: float) -> None:
        if not 0 < target < float("inf"):
            raise ConfigError(f"target_itl_ms must be above 0, not {target}")
        if not self.enable_chunked_prefill:
            raise ConfigError("target_itl_ms splits prompts over steps: it needs enable_chunked_prefill")
        if self.batch_invariant:
            raise ConfigError(
                "batch_invariant and target_itl_ms exclude each other: with batch_invariant every step takes "
                "as long as the largest; lower chunked_prefill_size instead"
            )

    def _check_speculation(self) -> None:
        assert self.speculative_config is not None
        SpeculativeConfig.parse(self.speculative_config)
        if self.batch_invariant:
            raise ConfigError(
                "batch_invariant and speculative_config exclude each other: the number of tokens that a step "
                "computes for a request depends on its drafts, and the bits of its results depend on that "
                "number"
            )
        if self.enable_cascade_attention:
            raise ConfigError(
                "enable_cascade_attention and speculative_config exclude each other: cascade attention "
                "computes one token per request, a step with drafts several"
            )

    def _check_adapters(self) -> None:
        if self.max_lora_rank > MAX_LORA_RANK:
            raise ConfigError(f"max_lora_rank must be at most {MAX_LORA_RANK}, not {self.max_lora_rank}")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.adapter_slots:
            raise ConfigError(
                f"max_cpu_loras ({self.max_cpu_loras}) is below max_loras ({self.max_loras}): adapters on "
                "the device are kept on the host as well"
            )

    def _check_types(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            kinds = _KINDS[str(entry.type).removesuffix(" | None")]
            is_missing = value is None and entry.default is None
            # A bool passes for an int in Python; here it is a mistake.
            is_wrong_bool = isinstance(value, bool) and bool not in kinds
            if not is_missing and (not isinstance(value, kinds) or is_wrong_bool):
                raise ConfigError(f"{entry.name} must be of type {entry.type}, not {value!r}")

    def _check_batch_invariant(self) -> None:
        if self.is_eager:
            raise ConfigError("batch_invariant pads every step to one captured shape: it needs graphs")
        if self.enable_cascade_attention:
            raise ConfigError(
                "batch_invariant and enable_cascade_attention exclude each other: the prefix that a request "
                "shares depends on what runs beside it"
            )

    @property
    def grammar_limits(self) -> GrammarLimits:
        """Limits on time, memory and processes of grammars."""
        return GrammarLimits(
            compile_seconds=self.grammar_compile_seconds,
            mask_seconds=self.grammar_mask_seconds,
            memory_mb=self.grammar_memory_mb,
            processes=self.grammar_processes,
        )

    @property
    def adapter_slots(self) -> int:
        """Number of adapter slots on the device, if adapters are served."""
        return self.max_loras or min(4, self.max_cpu_loras or 4)

    @property
    def serves_adapters(self) -> bool:
        """Whether requests may have adapters."""
        return self.enable_lora or bool(self.lora_modules)

    @property
    def is_eager(self) -> bool:
        """Whether no graphs are to be captured."""
        return self.disable_cuda_graph or self.cuda_graph_mode.lower() == "none"
