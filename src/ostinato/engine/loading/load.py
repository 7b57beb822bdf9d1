"""From a configuration to a loaded model with its tokenizer, and a KV cache that fits beside it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ostinato.cache.kv import KVCache, KVCacheError, KVShape
from ostinato.graphs import OstinatoError
from ostinato.kernels.attention import AttentionBackend, BackendError, get_backend
from ostinato.kernels.compiling import triton_start
from ostinato.models.adapters.stacks import AdapterStacks
from ostinato.models.config import ModelConfig
from ostinato.models.drafts.draft import Draft
from ostinato.models.errors import DownloadError, ModelError
from ostinato.models.locate import locate_model
from ostinato.models.transformer import Transformer
from ostinato.models.weights import LoadFormat, fill_model
from ostinato.text.errors import TokenizerError
from ostinato.text.json_file import read_json
from ostinato.text.tokenizer import Tokenizer

from ..config import EngineConfig
from ..resolved_config import ResolvedConfig, resolve
from .defaults import default_pooling, default_sampling
from .device_memory import MemoryPlan
from .drafts import draft_for, load_draft
from .kernel_table import use_table_of_user
from .saved_memory import Arenas, SavedMemory, from_torch
from .shortage import Room, is_short_of_one_request, no_room_for_kv, no_room_for_weights, too_many_pages

logger = logging.getLogger("ostinato.engine")

CPU_KV_BYTES = 1 << 30
"""Maximum size of the KV cache on a CPU, unless num_pages is given; memory is committed only when used."""


class ModelLoadError(OstinatoError, ValueError):
    """The model cannot be loaded with these options; the message says what is wrong."""


@dataclass(frozen=True, kw_only=True)
class PlacedModel:
    """A model with its memory allocated: graphs that are recorded now stay valid once its weights are
    read."""

    directory: Path
    config: ResolvedConfig
    model: Transformer
    attention: AttentionBackend
    arenas: Arenas = from_torch
    """Where memory for weights and KV cache comes from."""
    memory: SavedMemory | None = None
    """In sleep mode: everything that the engine allocates for good."""
    adapters: AdapterStacks | None = None
    """Adapter slots, if adapters are served."""
    draft: Draft | None = None
    """The draft model, if one is configured."""
    room: Room | None = None
    """Memory of the device before any of this was allocated; None: on a CPU."""
    is_first: bool = False
    """Whether torch held nothing on the GPU before."""
    tokenizer_directory: Path


@dataclass(frozen=True, kw_only=True)
class LoadedModel(PlacedModel):
    """A model ready to run."""

    tokenizer: Tokenizer | None
    """None if the directory has none: then prompts are token ids."""
    eos_token_ids: frozenset[int]
    default_sampling: Mapping[str, Any]
    """Defaults for requests that leave them out: fields of `SamplingParams`."""
    pooling: str = "last"
    """How vectors of texts are made by default."""


def place(asked: EngineConfig, arenas: Arenas = from_torch) -> PlacedModel:
    """Find the model and allocate it. `read` fills its weights; until then kernels can be compiled."""
    room, memory, draft, adapters, is_first = None, None, None, None, False
    with _told():
        if torch.version.cuda is not None and asked.device != "cpu":
            triton_start.begin()  # while torch looks for GPUs
        directory = locate_model(asked.model, revision=asked.revision, download_dir=asked.download_dir)
        beside_it = directory
        if asked.tokenizer is not None:
            beside_it = locate_model(asked.tokenizer, download_dir=asked.download_dir)
        shape = ModelConfig.load(directory, asked.hf_overrides)
        config = resolve(asked, shape.max_position_embeddings, getattr(torch, shape.dtype))
        found_draft = draft_for(shape, config)
        if config.device.type == "cuda":
            is_first = not torch.cuda.memory_reserved(config.device)
            torch.empty(1, device=config.device)  # creates the context, while Triton is imported
            room = Room.on(config.device)
        attention = get_backend(asked.attention_backend, config.device)
        use_table_of_user(asked.kernel_table, config.device)
    with _told(), _no_room_told(shape, config, room):
        if asked.enable_sleep_mode:
            memory = SavedMemory(config.device, hostile=asked.hostile_wake)
            arenas = memory.arenas
        model = Transformer(
            shape,
            device=config.device,
            dtype=config.dtype,
            max_positions=config.max_positions,
            allocate=arenas("weights", config.device),
        )
        if memory is not None:
            memory.take_over_buffers(model)
        if found_draft is not None:  # its weights may depend on the model's
            _fill(model, directory, asked)
            draft = load_draft(found_draft, model, config, arenas, memory)
        if asked.serves_adapters:
            slots, rank = asked.adapter_slots, asked.max_lora_rank
            adapters = AdapterStacks(model, slots, rank, arenas("weights", config.device))
    return PlacedModel(
        directory=directory,
        config=config,
        model=model,
        attention=attention,
        arenas=arenas,
        memory=memory,
        adapters=adapters,
        draft=draft,
        room=room,
        is_first=is_first,
        tokenizer_directory=beside_it,
    )


def read(placed: PlacedModel) -> LoadedModel:
    """Read the files: weights (unless they came with those of a draft), the tokenizer, and the defaults of
    requests."""
    asked, directory = placed.config.config, placed.directory
    with _told(), _no_room_told(placed.model.config, placed.config, placed.room):
        # Reading a tokenizer takes as long as reading a small model's weights.
        with ThreadPoolExecutor(1) as beside:
            reading = beside.submit(_tokenizer, placed.tokenizer_directory)
            if placed.draft is None:
                _fill(placed.model, directory, asked)
            tokenizer = reading.result()
        eos = set(tokenizer.eos_token_ids) if tokenizer else set[int]()
        if tokenizer is None or asked.tokenizer is not None:
            eos.update(_eos_token_ids(directory))
        sampling = default_sampling(asked, directory)
        pooling = default_pooling(directory)
    config = placed.config
    architecture = placed.model.config.architecture
    logger.info("loaded %s (%s) on %s in %s", directory.name, architecture, config.device, config.dtype)
    fields = {field.name: getattr(placed, field.name) for field in dataclasses.fields(placed)}
    return LoadedModel(
        **fields,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(eos),
        default_sampling=sampling,
        pooling=pooling,
    )


@contextmanager
def _told() -> Iterator[None]:
    """Turn errors about files into a ModelLoadError."""
    try:
        yield
    except (ModelError, DownloadError, TokenizerError, BackendError) as error:
        raise ModelLoadError(str(error)) from error


@contextmanager
def _no_room_told(shape: ModelConfig, config: ResolvedConfig, room: Room | None) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        if room is None:
            raise
        weights = weight_bytes(shape, config.dtype)
        raise ModelLoadError(no_room_for_weights(config, weights, room)) from error


def _fill(model: Transformer, directory: Path, asked: EngineConfig) -> None:
    kind: LoadFormat = "dummy" if asked.load_format == "dummy" else "safetensors"
    allow = asked.allow_nonfinite_weights
    fill_model(model, directory, load_format=kind, seed=asked.seed, allow_nonfinite=allow)


def weight_bytes(shape: ModelConfig, dtype: torch.dtype) -> int:
    """Size of the weights of such a model, in bytes."""
    return sum(tensor.nbytes for tensor in Transformer(shape, device="meta", dtype=dtype).parameters())


def kv_shape(model: Transformer, config: ResolvedConfig) -> KVShape:
    """What the model stores per token."""
    shape = model.config
    return KVShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, config.dtype)


def allocate_kv(
    model: Transformer,
    config: ResolvedConfig,
    plan: MemoryPlan,
    arenas: Arenas = from_torch,
    beside: KVShape | None = None,
) -> KVCache:
    """The KV cache, with the given number of pages, or with as many as fit beside weights and what `rehearse`
    found.

    `beside`: what a draft stores per token. It gets as many pages of its own, for which room is left.
    """
    shape = kv_shape(model, config)
    page_bytes = shape.bytes_per_page + (0 if beside is None else beside.bytes_per_page)
    room = Room.on(config.device) if config.device.type == "cuda" else None
    try:
        pages = config.config.num_pages or _pages_that_fit(model, config, plan, page_bytes, room)
        cache = KVCache(shape, pages, config.device, arenas("kv_cache", config.device))
    except KVCacheError as error:
        raise ModelLoadError(str(error)) from error
    except torch.OutOfMemoryError as error:
        if room is None:
            raise
        raise ModelLoadError(too_many_pages(config, pages, page_bytes, room)) from error
    if room is not None and (short := is_short_of_one_request(config, pages, page_bytes, room)):
        logger.warning("%s", short)
    logger.info("KV cache: %d pages, %.1f MiB", pages, cache.num_bytes / 2**20)
    return cache


def _pages_that_fit(
    model: Transformer, config: ResolvedConfig, plan: MemoryPlan, page_bytes: int, room: Room | None
) -> int:
    if room is None:
        # Pages of all requests at full length, and page 0: more would be used as prefix cache only.
        useful = config.max_running_requests * config.page_columns + 1
        return min(useful, max(CPU_KV_BYTES // page_bytes, config.page_columns + 1))
    pages = (room.allowed(config.config.mem_fraction) - plan.to_come) // page_bytes
    if pages < 2:
        weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        raise ModelLoadError(no_room_for_kv(config, plan, weights, page_bytes, room))
    return pages


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
