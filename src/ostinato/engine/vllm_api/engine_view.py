"""What an engine runs with, under the names of vLLM's configuration objects; read-only."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from ostinato.kernels.constants import PAGE_SIZE

from ..core import EngineCore


class _Engine(Protocol):
    """`TextEngine`, which makes views of itself."""

    core: EngineCore


class ModelView:
    """`model_config`."""

    def __init__(self, engine: _Engine) -> None:
        self._loaded = engine.core.loaded
        self.model = str(self._loaded.directory)
        self.tokenizer = str(self._loaded.tokenizer_directory)
        self.max_model_len: int = engine.core.config.max_model_len
        self.dtype: torch.dtype = engine.core.config.dtype
        self.seed: int = engine.core.config.config.seed
        self.runner_type = "generate" if self._loaded.model.config.has_lm_head else "pooling"

    @property
    def hf_config(self) -> SimpleNamespace:
        """The fields of config.json."""
        raw = json.loads((self._loaded.directory / "config.json").read_text())
        return SimpleNamespace(**{**raw, **(self._loaded.config.config.hf_overrides or {})})

    def get_vocab_size(self) -> int:
        """Number of token ids."""
        return self._loaded.model.config.vocab_size

    def get_hidden_size(self) -> int:
        """Size of a hidden state."""
        return self._loaded.model.config.hidden_size

    def get_head_size(self) -> int:
        """Size of an attention head."""
        return self._loaded.model.config.head_dim


class VllmConfigView:
    """`vllm_config`."""

    def __init__(self, engine: _Engine) -> None:
        core = engine.core
        config, asked = core.config, core.config.config
        self.model_config = ModelView(engine)
        self.cache_config = SimpleNamespace(
            block_size=PAGE_SIZE,
            num_gpu_blocks=core.scheduler.pages.num_usable,
            gpu_memory_utilization=asked.mem_fraction,
            enable_prefix_caching=asked.enable_prefix_caching,
        )
        self.scheduler_config = SimpleNamespace(
            max_num_seqs=config.max_running_requests,
            max_num_batched_tokens=config.max_batched_tokens,
            max_model_len=config.max_model_len,
        )
        self.parallel_config = SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, world_size=1
        )
        self.compilation_config = SimpleNamespace(
            cudagraph_mode=config.graph_mode, cudagraph_capture_sizes=list(config.decode_ladder)
        )

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"vllm_config has no {name} here, only {', '.join(vars(self))}")
