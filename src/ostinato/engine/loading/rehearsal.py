"""Before the KV cache is there: compile what steps need, and find out what their graphs will take.

Runs on a GPU only, against a KV cache of two pages. Nothing of it stays but compiled kernels and a plan.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from ostinato.cache.kv import KVCache
from ostinato.graphs import CudaGraphRunner, GraphKey
from ostinato.kernels.compile_ahead import compiling_only

from ..sampling.sampler import Sampler
from ..stepping.model_runner import ModelRunner
from ..stepping.times import StartupTimes
from .arenas import from_torch
from .device_memory import DeviceMemory
from .drafts import draft_parts
from .load import LoadedModel, kv_shape
from .memory_plan import MemoryPlan

_NODES_OF_AN_EMPTY_GRAPH = 200
"""What the driver holds for a graph without nodes, in nodes: about."""


def rehearse(loaded: LoadedModel, times: StartupTimes) -> MemoryPlan:
    """Compile the kernels of all graphs; what graphs and buffers will take."""
    device = loaded.config.device
    if device.type != "cuda":
        return MemoryPlan()
    gc.collect()  # what goes meanwhile would make the buffers look smaller
    before = DeviceMemory.now(device)
    plan = _rehearse(loaded, times)
    with times.phase("rehearse"):
        # A runner and its graphs know each other, and what they hold must be gone before anything is sized.
        gc.collect()
        torch.cuda.empty_cache()
    kept = DeviceMemory.now(device).less(before)
    return replace(plan, workspace=max(0, kept.allocated))


def _rehearse(loaded: LoadedModel, times: StartupTimes) -> MemoryPlan:
    config = loaded.config
    with times.phase("compile"):
        kv = KVCache(kv_shape(loaded.model, config), 2, config.device)
        before = DeviceMemory.now(config.device)
        draft = draft_parts(loaded.draft, kv.num_pages, config, from_torch)
        runner = ModelRunner(
            loaded.model, kv, loaded.attention, config, adapters=loaded.adapters, draft=draft
        )
        sampler = Sampler(runner) if loaded.model.config.has_lm_head else None
        buffers = DeviceMemory.now(config.device).less(before).allocated
        _compile(runner, sampler)
    if config.config.num_pages is not None:
        return MemoryPlan(buffers)
    with times.phase("rehearse"):
        # The engine will make these buffers again, behind its KV cache.
        return replace(_trial_capture(runner, sampler), buffers=buffers)


def _compile(runner: ModelRunner, sampler: Sampler | None) -> None:
    done = set()
    with compiling_only(runner.lengths.device), runner.model.one_layer_of_each_kind():
        for key in runner.graphs.keys:
            kernels = runner.planned.kernels_of(key)
            if kernels not in done:
                done.add(kernels)
                runner.graphs.try_out(key)
        if sampler is not None:
            sampler.try_out()
        if runner.speculation is not None:
            runner.speculation.try_out()


def _trial_capture(runner: ModelRunner, sampler: Sampler | None) -> MemoryPlan:
    """Capture some graphs of each kind; count, and drop them.

    Others fit into the memory of these; each still takes something outside the pool, which follows from its
    nodes.
    """
    before = DeviceMemory.now(runner.config.device)
    of_sampling = [] if sampler is None else list(sampler.graphs.values())
    runner.capture(StartupTimes(), keys=_some_of(runner.graphs.keys, runner.planned.widens), progress=False)
    for graphs in of_sampling:
        graphs.capture(keys=graphs.keys[:1], progress=False)
    grown = DeviceMemory.now(runner.config.device).less(before)
    of_driver = grown.by_driver
    known = [runner.graphs, *of_sampling]
    of_drafts = () if runner.speculation is None else runner.speculation.runners
    runners = [*known, runner.rows.scatter, *of_drafts]
    tried, all_nodes = (sum(each) for each in zip(*map(_nodes, runners), strict=True))
    plan = MemoryPlan(
        activations=_pool_bytes(runners),
        executables=round(of_driver * (all_nodes / tried - 1)) if tried else 0,
        rungs=[_growth(graphs) for graphs in known],
    )
    for graphs in runners:
        graphs.drop()
    return plan


def _some_of(keys: Iterable[GraphKey], widens: Callable[[GraphKey], bool]) -> list[GraphKey]:
    """The largest of each kind, the largest that widens its rows, and the smallest."""
    kinds: dict[object, list[GraphKey]] = {}
    for key in keys:
        kinds.setdefault(_kind(key), []).append(key)
    some = ((of[0], next(filter(widens, of), of[0]), of[-1]) for of in kinds.values())
    return list(dict.fromkeys(key for of in some for key in of))


def _kind(key: GraphKey) -> object:
    of = key.descriptor
    return key.mode, of.query_len, of.cascade, of.lora, of.is_alone


def _nodes(graphs: CudaGraphRunner) -> tuple[int, int]:
    """Of the graphs that were captured, and of all, if those of a kind have equally many."""
    found: dict[object, list[int]] = {}
    for key, graph in graphs.graphs.items():
        found.setdefault(_kind(key), []).append(_NODES_OF_AN_EMPTY_GRAPH + (graph.recorded.nodes or 0))
    each = {kind: sum(nodes) / len(nodes) for kind, nodes in found.items()}
    tried = sum(sum(nodes) for nodes in found.values())
    return tried, round(sum(each.get(_kind(key), 0) for key in graphs.keys))


def _pool_bytes(runners: Sequence[CudaGraphRunner]) -> int:
    """What the pool will hold: all of its budget, if that was too little for the largest graphs."""
    pool = runners[0].pool
    is_short = pool.budget is not None and any(graphs.failures for graphs in runners)
    return pool.budget if is_short and pool.budget is not None else pool.bytes


def _growth(graphs: CudaGraphRunner) -> dict[GraphKey, int]:
    """By key; where a budget decides, the runner finds out for itself."""
    if graphs.pool.budget is not None:
        return {}
    captured = {key: graph.recorded.bytes for key, graph in graphs.graphs.items()}
    return {key: captured.get(key, 0) for key in graphs.keys}
