"""What can be set about an engine. Each field is a keyword of `LLM` and a flag; its docstring is the help."""

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
    """As the user asked; what depends on the model and the machine is filled in by `resolve`."""

    model: str | None = None
    """A directory, a GGUF file or a hub name; default: SmolLM2-135M-Instruct."""
    dtype: str = "auto"
    """float32, bfloat16, float16; auto: the model's own on a GPU, float32 on a CPU."""
    tokenizer: str | None = None
    """A directory or a hub name with the tokenizer's files; default: the model's own."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub."""
    download_dir: str | None = None
    """Where models of the hub are kept; default: as huggingface_hub does."""
    hf_overrides: Mapping[str, Any] | None = None
    """Values that go before those of the model's config.json."""
    load_format: str = "auto"
    """auto, or dummy: random weights from a config.json alone."""
    device: str = "auto"
    """cuda, cpu; auto: the current GPU, where there is one."""
    max_model_len: int | None = None
    """Longest prompt plus output; default: the model's own limit, at most 8192 on a GPU, 2048 on a CPU."""
    max_running_requests: int | None = None
    """Most requests in one step; default: 256 on a GPU, 16 on a CPU."""
    chunked_prefill_size: int | None = None
    """Most tokens in one step; longer prompts run in chunks. Default: 4096 on a GPU, 128 on a CPU."""
    enable_chunked_prefill: bool = True
    """Split prompts over several steps; without it a step holds a prompt of max_model_len tokens."""
    target_itl_ms: float | None = None
    """Time between two tokens of a stream, in milliseconds, that prompts beside it are to keep: while streams
    run, a step takes only as many tokens of prompts as fit. Default: as many as chunked_prefill_size says."""
    mem_fraction: float = 0.9
    """Share of the GPU's memory that weights, KV cache and graphs may take together."""
    num_pages: int | None = None
    """KV pages of 16 tokens, instead of as many as fit."""
    enable_prefix_caching: bool = True
    """Share the KV pages of equal prompt beginnings."""
    enable_cascade_attention: bool = False
    """Let decode batches whose requests all share a long prefix read its KV once a step, instead of once a
    request: one more graph for each captured decode batch."""
    steps_ahead: int | None = None
    """Steps launched before the tokens of the last one are read, 0 or 1. Default: 1 on a GPU, 0 on a CPU."""
    attention_backend: str = "auto"
    """torch or triton; auto: triton on a GPU."""
    kernel_table: str | None = None
    """A file that `ostinato tune` wrote: which kernels linear layers run with; none: no table at all, rules
    decide. Default: the one named by OSTINATO_KERNEL_TABLE, else the one in the cache folder for such GPUs;
    then the package's own."""
    seed: int = 0
    """For requests that bring no seed of their own."""
    generation_config: str = "auto"
    """Where requests that leave out temperature, top_p, top_k, min_p, repetition_penalty or max_tokens get
    them: the generation_config.json of a folder; auto: that of the model; none: neutral values."""
    override_generation_config: Mapping[str, Any] | None = None
    """Values that go before those of generation_config."""
    max_logprobs: int = 20
    """The most alternatives per token whose log probabilities a request may ask for; -1: the whole
    vocabulary."""
    logprobs_mode: str = "raw_logprobs"
    """Log probabilities of tokens under the model itself (raw_logprobs), or under what they are drawn from,
    with penalties, masks, temperature and filters (processed_logprobs)."""
    logits_processors: tuple[Any, ...] | None = None
    """Classes that change the logits of a batch before tokens are drawn, as vLLM's are (docs/engine.md), or
    their names: module:Class."""
    grammar_compile_seconds: float = 10.0
    """Most time to compile the grammar of a structured output, a schema or an expression."""
    grammar_mask_seconds: float = 2.0
    """Most time for a grammar to say which tokens may come next; the second time it takes longer its request
    ends. Other requests do not wait for it."""
    grammar_memory_mb: int = 512
    """Most memory of the process in which one grammar is compiled and followed."""
    grammar_processes: int = 64
    """Most different grammars in use at the same time, each in a process; requests with further ones wait."""
    cuda_graph_mode: str = "auto"
    """none, piecewise, full, full-decode-only, full-and-piecewise; auto: full with triton attention, else
    full-and-piecewise."""
    disable_cuda_graph: bool = False
    """The same as mode none."""
    cuda_graph_max_bs: int | None = None
    """Largest captured decode batch, in requests; default, and at most: max_running_requests. Larger ones run
    from prefill graphs, or without a graph."""
    cuda_graph_bs: tuple[int, ...] | None = None
    """Captured decode batches, in requests, instead of the default list."""
    cuda_graph_prefill_tokens: tuple[int, ...] | None = None
    """Captured prefill sizes, in tokens, instead of the default list up to chunked_prefill_size. Larger steps
    run without a graph: set chunked_prefill_size to the last size to have none."""
    cuda_graph_ladder: str = "auto"
    """Default list of captured decode batches: sglang, vllm, dense (1 to 32, then by 32); auto: sglang on a
    GPU, powers of two on a CPU."""
    disable_cuda_graph_padding: bool = False
    """Replay only batches of exactly a captured size."""
    enable_cudagraph_gc: bool = False
    """Let the garbage collector run while capturing."""
    cuda_graph_memory_mb: int | None = None
    """Most memory that graphs take together; those that save the least padding for it are given up."""
    cuda_graph_debug_log: bool = False
    """Log every graph as it is captured."""
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    """vLLM's list, in tokens: taken as cuda_graph_bs (as far as so many requests run) and
    cuda_graph_prefill_tokens."""
    max_cudagraph_capture_size: int | None = None
    """vLLM's limit, in tokens: cuts both default lists. Larger steps run without a graph."""
    enable_lora: bool = False
    """Serve LoRA adapters beside the model: one more graph for each captured size."""
    max_loras: int | None = None
    """Different adapters in one step: slots on the device. Requests with further ones wait. Default: 4, or
    max_cpu_loras if that is less."""
    max_lora_rank: int = 16
    """The highest rank of an adapter, at most 256; every slot has room for it."""
    max_cpu_loras: int | None = None
    """Adapters kept on the host, those on the device among them; others are read again when they are asked
    for. Default: max_loras, at least 8."""
    lora_modules: tuple[str, ...] | None = None
    """Adapters to load at the start: name=directory, or a JSON object with name, path and pinned. With some,
    enable_lora is on."""
    cudagraph_specialize_lora: bool = True
    """Keep graphs without adapters for steps without; otherwise all steps run from the graphs with."""
    enable_sleep_mode: bool = False
    """Allocate weights, KV cache and memory of graphs so that `sleep` can give them back to the device."""
    hostile_wake: bool = False
    """For debugging: fill all memory with NaNs and large integers at every wake_up, before what is restored
    is restored. Needs enable_sleep_mode."""
    worker_extension_cls: str | None = None
    """A class, as package.module.Class, whose methods `collective_rpc` can call; see docs/memory.md."""
    weight_transfer_timeout: float = 300.0
    """Seconds that a trainer's process has to come to a group, or to a broadcast of weights."""
    speculative_config: Mapping[str, Any] | None = None
    """Draft tokens and verify several of them in a step: vLLM's keys, see docs/speculation.md. What comes out
    is what would without it."""
    batch_invariant: bool = False
    """Give each request the same bits whatever runs beside it: one shape for every step. Slower."""

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
            raise ConfigError("hostile_wake is about memory that sleeps: it needs enable_sleep_mode")
        if self.batch_invariant:
            self._check_batch_invariant()
        if self.speculative_config is not None:
            self._check_speculation()

    def _check_target_itl(self, target: float) -> None:
        if not 0 < target < float("inf"):
            raise ConfigError(f"target_itl_ms must be above 0, not {target}")
        if not self.enable_chunked_prefill:
            raise ConfigError("target_itl_ms cuts prompts: it needs enable_chunked_prefill")
        if self.batch_invariant:
            raise ConfigError(
                "batch_invariant and target_itl_ms exclude each other: every step takes as long as the "
                "largest; lower chunked_prefill_size"
            )

    def _check_speculation(self) -> None:
        assert self.speculative_config is not None
        SpeculativeConfig.parse(self.speculative_config)
        if self.batch_invariant:
            raise ConfigError(
                "batch_invariant and speculative_config exclude each other: how many tokens a step computes "
                "for a request depends on its drafts, and bits depend on that"
            )
        if self.enable_cascade_attention:
            raise ConfigError(
                "enable_cascade_attention and speculative_config exclude each other: a shared prefix is read "
                "once for single tokens only"
            )

    def _check_adapters(self) -> None:
        if self.max_lora_rank > MAX_LORA_RANK:
            raise ConfigError(f"max_lora_rank must be at most {MAX_LORA_RANK}, not {self.max_lora_rank}")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.adapter_slots:
            raise ConfigError(
                f"max_cpu_loras ({self.max_cpu_loras}) is below max_loras ({self.max_loras}): what is on the "
                "device is on the host as well"
            )

    def _check_types(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            kinds = _KINDS[str(entry.type).removesuffix(" | None")]
            is_missing = value is None and entry.default is None
            # A bool is an int to Python, and a mistake here.
            is_wrong_bool = isinstance(value, bool) and bool not in kinds
            if not is_missing and (not isinstance(value, kinds) or is_wrong_bool):
                raise ConfigError(f"{entry.name} must be of type {entry.type}, not {value!r}")

    def _check_batch_invariant(self) -> None:
        if self.is_eager:
            raise ConfigError("batch_invariant pads every step to one captured shape: it needs graphs")
        if self.enable_cascade_attention:
            raise ConfigError(
                "batch_invariant and enable_cascade_attention exclude each other: what a request shares "
                "depends on what runs beside it"
            )

    @property
    def grammar_limits(self) -> GrammarLimits:
        """What a grammar may take."""
        return GrammarLimits(
            compile_seconds=self.grammar_compile_seconds,
            mask_seconds=self.grammar_mask_seconds,
            memory_mb=self.grammar_memory_mb,
            processes=self.grammar_processes,
        )

    @property
    def adapter_slots(self) -> int:
        """Of the device, where adapters are served."""
        return self.max_loras or min(4, self.max_cpu_loras or 4)

    @property
    def serves_adapters(self) -> bool:
        """Whether requests may have adapters."""
        return self.enable_lora or bool(self.lora_modules)

    @property
    def is_eager(self) -> bool:
        """Whether there are to be no graphs."""
        return self.disable_cuda_graph or self.cuda_graph_mode.lower() == "none"
