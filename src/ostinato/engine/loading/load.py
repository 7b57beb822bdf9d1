"""From a configuration to a model with its tokenizer in memory, and to a KV cache that fits beside it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ostinato.cache.kv import KVCache, KVCacheError, KVShape
from ostinato.graphs import OstinatoError
from ostinato.kernels import triton_start
from ostinato.kernels.attention import AttentionBackend, BackendError, get_backend
from ostinato.models.adapters.stacks import AdapterStacks
from ostinato.models.config import ModelConfig
from ostinato.models.errors import DownloadError, ModelError
from ostinato.models.locate import locate_model
from ostinato.models.transformer import Transformer
from ostinato.models.weights import load_model
from ostinato.text.errors import TokenizerError
from ostinato.text.json_file import read_json
from ostinato.text.tokenizer import Tokenizer

from ..config import EngineConfig, ResolvedConfig
from .arenas import Arenas, from_torch
from .default_sampling import default_sampling
from .kernel_table import use_table_of_user
from .saved_memory import SavedMemory

logger = logging.getLogger("ostinato.engine")

CPU_KV_BYTES = 1 << 30
"""The most a KV cache takes on a CPU, unless num_pages is given; memory is touched only as it is used."""


class ModelLoadError(OstinatoError, ValueError):
    """The model cannot be loaded as asked; the text says what is wrong with it."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run."""

    directory: Path
    config: ResolvedConfig
    model: Transformer
    attention: AttentionBackend
    tokenizer: Tokenizer | None
    """None where the directory has none: prompts are token ids then."""
    tokenizer_directory: Path
    eos_token_ids: frozenset[int]
    default_sampling: Mapping[str, Any]
    """Of requests that do not say: fields of `SamplingParams`."""
    arenas: Arenas = from_torch
    """Who gives memory for weights and KV cache."""
    memory: SavedMemory | None = None
    """Of an engine in sleep mode: all that it allocates for good."""
    adapters: AdapterStacks | None = None
    """Slots of adapters, where they are served."""


def load(asked: EngineConfig, arenas: Arenas = from_torch) -> LoadedModel:
    """Find, read and place the model that was asked for."""
    try:
        of_hub = {"revision": asked.revision, "download_dir": asked.download_dir}
        directory = locate_model(asked.model, **of_hub)
        beside_it = directory
        if asked.tokenizer is not None:
            beside_it = locate_model(asked.tokenizer, download_dir=asked.download_dir)
        shape = ModelConfig.load(directory, asked.hf_overrides)
        config = asked.resolved(shape.max_position_embeddings, getattr(torch, shape.dtype))
        if config.device.type == "cuda":
            triton_start.begin()
            torch.empty(1, device=config.device)  # makes the context, while Triton is imported
        memory = None
        if asked.enable_sleep_mode:
            memory = SavedMemory(config.device, hostile=asked.hostile_wake)
            arenas = memory.arenas
        attention = get_backend(asked.attention_backend, config.device)
        use_table_of_user(asked.kernel_table, config.device)
        # Reading a tokenizer takes as long as reading a small model's weights.
        with ThreadPoolExecutor(1) as beside:
            reading = beside.submit(_tokenizer, beside_it)
            model = load_model(
                directory,
                device=config.device,
                dtype=config.dtype,
                load_format="dummy" if asked.load_format == "dummy" else "safetensors",
                max_positions=config.max_model_len,
                seed=asked.seed,
                allocate=arenas("weights", config.device),
                config=shape,
            )
            tokenizer = reading.result()
        if memory is not None:
            memory.take_over_buffers(model)
        adapters = None
        if asked.serves_adapters:
            slots, rank = asked.adapter_slots, asked.max_lora_rank
            adapters = AdapterStacks(model, slots, rank, arenas("weights", config.device))
        eos = set(tokenizer.eos_token_ids) if tokenizer else set[int]()
        if tokenizer is None or asked.tokenizer is not None:
            eos.update(_eos_token_ids(directory))
        sampling = default_sampling(asked, directory)
    except (ModelError, DownloadError, TokenizerError, BackendError) as error:
        raise ModelLoadError(str(error)) from error
    logger.info("loaded %s (%s) on %s in %s", directory.name, shape.architecture, config.device, config.dtype)
    names = frozenset(eos)
    return LoadedModel(
        directory, config, model, attention, tokenizer, beside_it, names, sampling, arenas, memory, adapters
    )


def kv_shape(model: Transformer, config: ResolvedConfig) -> KVShape:
    """What the model stores per token."""
    shape = model.config
    return KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, config.dtype)


def allocate_kv(
    model: Transformer, config: ResolvedConfig, graph_bytes: int, arenas: Arenas = from_torch
) -> KVCache:
    """The KV cache: as many pages as asked for, or as fit beside weights and what `rehearse` found."""
    shape = kv_shape(model, config)
    # Pages of all requests at their longest, and page 0: more would never be used but as prefix cache.
    useful = config.max_running_requests * config.page_columns + 1
    try:
        if config.config.num_pages is not None:
            pages = config.config.num_pages
        elif config.device.type == "cuda":
            pages = shape.pages_that_fit(_free_on_gpu(config) - graph_bytes)
        else:
            pages = min(useful, max(shape.pages_that_fit(CPU_KV_BYTES), config.page_columns + 1))
        cache = KVCache(shape, pages, config.device, arenas("kv_cache", config.device))
    except KVCacheError as error:
        raise ModelLoadError(str(error)) from error
    logger.info("KV cache: %d pages, %.1f MiB", pages, cache.num_bytes / 2**20)
    return cache


def _free_on_gpu(config: ResolvedConfig) -> int:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(config.device)
    return int(total * config.config.mem_fraction) - (total - free)


def _tokenizer(directory: Path) -> Tokenizer | None:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((directory / name).is_file() for name in names):
        return None
    return Tokenizer.from_directory(directory)


def _eos_token_ids(directory: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        found = read_json(directory / name).get("eos_token_id")
        if found is not None:
            return found if isinstance(found, list) else [found]
    return []
