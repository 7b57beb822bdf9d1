"""The parts of an engine, put together in the order in which they take memory: the KV cache, then rows and
inputs, sampling, and the graphs."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from ostinato.cache.pages import PageAllocator
from ostinato.graphs import GraphMode, frozen_gc
from ostinato.models.adapters.reading import AdapterReader
from ostinato.models.config import ModelConfig

from .adapters.served_adapters import ServedAdapters, load_first_adapters
from .loading.device_memory import DeviceMemory, MemoryPlan
from .loading.drafts import draft_kv_shape, draft_parts, draft_windows
from .loading.load import LoadedModel, ModelLoadError, PlacedModel, allocate_kv, read
from .loading.rehearsal import Rehearsal
from .loading.shortage import Room, no_room_for_steps
from .resolved_config import ResolvedConfig
from .sampling.following import Following
from .sampling.sampler import Sampler
from .scheduling.prompt_room import PromptBound
from .scheduling.scheduler import Scheduler
from .scheduling.scheduler_config import SchedulerConfig, window_of
from .scheduling.step_costs import StepCosts
from .sleeping.served_weights import ServedWeights
from .sleeping.sleeper import Sleeper
from .stepping.model_runner import ModelRunner
from .stepping.times import StartupTimes

logger = logging.getLogger("ostinato.engine")


@dataclass(frozen=True)
class EngineParts:
    """Ready to serve: everything is allocated and captured."""

    loaded: LoadedModel
    runner: ModelRunner
    sampler: Sampler | None
    """None: the model only embeds."""
    scheduler: Scheduler
    following: Following
    sleeper: Sleeper
    weights: ServedWeights
    adapters: ServedAdapters | None
    prompt_bound: PromptBound | None
    plan: MemoryPlan
    """What was predicted before the KV cache was allocated."""
    captured: DeviceMemory
    """What the captures took."""

    def memory(self) -> dict[str, int]:
        """Bytes by purpose; see `LLM.memory_report`."""
        runner = self.runner
        models = [model for model in (self.loaded.model, self.loaded.draft) if model is not None]
        tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        outputs = (runner.logits, runner.hidden)
        of_adapters = {} if runner.adapters is None else {"adapters": runner.adapters.num_bytes}
        found = {
            "weights": sum(tensor.nbytes for tensor in tensors),
            **of_adapters,
            "kv": runner.kv.num_bytes + (0 if runner.draft is None else runner.draft.kv.num_bytes),
            "inputs": runner.graphs.buffers.bytes + runner.rows.num_bytes,
            "outputs": sum(tensor.nbytes for tensor in outputs),
            "sampling": 0 if self.sampler is None else self.sampler.num_bytes,
            "activations": runner.graphs.pool.bytes,
            # What outlived the rehearsal, or was allocated during capture and belongs to no graph.
            "workspace": self.plan.workspace + max(0, self.captured.allocated - runner.pool.bytes_beside),
            "graphs": self.captured.by_driver,
            **self.plan.predictions,
        }
        return self.sleeper.less_what_is_away(found)


def put_together(placed: PlacedModel, startup: StartupTimes, progress: bool | None) -> EngineParts:
    """Read, allocate and capture; `startup` notes how long each phase takes."""
    # Once for all captures of the startup: walking torch's modules takes a tenth of a second. On a GPU on
    # which torch held nothing before, garbage holds no memory.
    with frozen_gc(not placed.config.config.enable_cudagraph_gc, collects=not placed.is_first):
        return _put_together(placed, startup, progress)


def _put_together(placed: PlacedModel, startup: StartupTimes, progress: bool | None) -> EngineParts:
    config = placed.config
    rehearsal = Rehearsal(placed, startup)
    try:
        with rehearsal, startup.phase("load"):
            loaded = read(placed)
        plan = rehearsal.plan()
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(no_room_for_steps(config, error, Room.on(config.device))) from error
    with startup.phase("kv"):
        beside = draft_kv_shape(loaded.draft, config.dtype)
        kv = allocate_kv(loaded.model, config, plan, loaded.arenas, beside)
        draft = draft_parts(loaded.draft, kv.num_pages, config, loaded.arenas)
    memory = loaded.memory
    with nullcontext() if memory is None else memory.static_buffers():
        of_graphs = None if memory is None else memory.of_graphs
        runner = ModelRunner(loaded.model, kv, loaded.attention, config, of_graphs, loaded.adapters, draft)
        sampler = Sampler(runner) if loaded.model.config.has_lm_head else None
    if memory is not None:
        memory.clear_at_wake(kv)
        if draft is not None:
            memory.clear_at_wake(draft.kv)
    sleeper = Sleeper(None if memory is None else memory.saver, config.device)
    allow = config.config.allow_nonfinite_weights
    weights = ServedWeights(loaded.model, sleeper, allow_nonfinite=allow)
    adapters = _served_adapters(loaded)
    prompt_bound = prompt_bound_of(config, loaded.model.config)
    # Both use pages with the same numbers: the target must not give up one that the draft still reads.
    windows = (*loaded.model.config.layer_windows, *draft_windows(loaded.draft, config.max_drafts))
    scheduler = Scheduler(
        SchedulerConfig(
            max_running=config.max_running_requests,
            max_batched_tokens=config.max_batched_tokens,
            max_model_len=config.max_model_len,
            chunked_prefill=config.config.enable_chunked_prefill,
            prefix_caching=config.config.enable_prefix_caching,
            shared_prefixes=config.config.enable_cascade_attention,
            lookahead=config.lookahead,
            window=window_of(windows, config.max_model_len),
            max_drafts=config.max_drafts,
        ),
        PageAllocator(kv.num_pages),
        None if adapters is None else adapters.slots,
        None if runner.speculation is None else runner.speculation.choose,
        prompt_bound,
    )
    following = Following(
        scheduler,
        loaded.tokenizer,
        loaded.model.config.vocab_size,
        config.config.grammar_limits,
    )
    _expect(plan, runner, sampler)
    runner.graphs.take_as_warm(rehearsal.warm)
    before = DeviceMemory.now(config.device)
    report = runner.capture(startup, progress=progress)
    if sampler is not None:
        with startup.phase("capture sampling"):
            sampler.capture(progress=False)
    captured = DeviceMemory.now(config.device).less(before)
    sleeper.driver_bytes = captured.by_driver
    parts = EngineParts(
        loaded=loaded,
        runner=runner,
        sampler=sampler,
        scheduler=scheduler,
        following=following,
        sleeper=sleeper,
        weights=weights,
        adapters=adapters,
        prompt_bound=prompt_bound,
        plan=plan,
        captured=captured,
    )
    logger.info("%s", report)
    logger.info("start: %s", ", ".join(f"{name} {s:.2f} s" for name, s in startup.read().items()))
    logger.info("memory: %s", ", ".join(f"{name} {size:,}" for name, size in parts.memory().items()))
    return parts


def _served_adapters(loaded: LoadedModel) -> ServedAdapters | None:
    if loaded.adapters is None:
        return None
    config = loaded.config
    reader = AdapterReader(loaded.model, config.config.max_lora_rank)
    adapters = ServedAdapters(reader, loaded.adapters, config.max_adapters_on_host)
    load_first_adapters(adapters, config.config.lora_modules or ())
    return adapters


def _expect(plan: MemoryPlan, runner: ModelRunner, sampler: Sampler | None) -> None:
    """Let reports show each graph's predicted memory beside what it took."""
    of_sampling = [] if sampler is None else list(sampler.graphs.values())
    for graphs, expected in zip((runner.graphs, *of_sampling), plan.rungs, strict=False):
        graphs.predicted |= expected


def prompt_bound_of(config: ResolvedConfig, model: ModelConfig) -> PromptBound | None:
    """None if no target is configured."""
    target = config.config.target_itl_ms
    if target is None:
        return None
    most = config.max_batched_tokens
    return PromptBound(
        target / 1e3,
        StepCosts(tokens_per_pair(model)),
        [*(size for size in config.token_ladder if size < most), most],
        are_captured=config.graph_mode.mixed is not GraphMode.NONE,
        window=window_of(model.layer_windows, config.max_model_len),
    )


def tokens_per_pair(model: ModelConfig) -> float:
    """Arithmetic per pair of query and key, as a fraction of that of all matrix products of a token."""
    attention = 2 * model.num_heads * model.head_dim
    projections = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim
    return attention / (model.hidden_size * (projections + 3 * model.intermediate_size))
