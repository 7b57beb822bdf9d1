"""Before the KV cache is allocated: compile the kernels of steps, and measure what their graphs will take.

Runs on a GPU only, with a KV cache of two pages. It leaves nothing but compiled kernels and a plan. Kernels
do not depend on the weights' values, so weights can be read while processes compile.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from types import TracebackType

import torch
from torch.nn import functional

from ostinato.cache.kv import KVCache
from ostinato.graphs import CudaGraphRunner, GraphKey
from ostinato.kernels.compiling.compile_ahead import Compilation

from ..sampling.sampler import Sampler
from ..stepping.model_runner import ModelRunner
from ..stepping.times import StartupTimes
from .device_memory import DeviceMemory, MemoryPlan
from .drafts import draft_parts
from .load import PlacedModel, kv_shape
from .saved_memory import from_torch

_NODES_OF_AN_EMPTY_GRAPH = 200
"""What the driver holds for a graph without nodes, expressed in nodes; approximate."""


class Rehearsal:
    """Rehearses an engine's steps, with a model whose weights may not be read yet.

    Kernels are compiled while its context is open; call `plan` after that. Does nothing on a CPU.
    """

    def __init__(self, placed: PlacedModel, times: StartupTimes) -> None:
        self._placed, self._times = placed, times
        self._open = ExitStack()
        self._runner: ModelRunner | None = None
        self._sampler: Sampler | None = None
        self._before, self._buffers = DeviceMemory(), 0
        self.warm: frozenset[Hashable] = frozenset()
        """Kernels that need no warm-up any more, as identified by `PlannedGraphs.warmed_with`."""

    def __enter__(self) -> Rehearsal:
        device = self._placed.config.device
        if self._is_on_gpu:
            with self._times.phase("compile"), ExitStack() as begun:
                gc.collect()  # garbage collected later would make the buffers look smaller
                self._before = DeviceMemory.now(device)
                self._make_steps()
                compilation = begun.enter_context(Compilation(device))
                with compilation.collecting():
                    self._try_out()
                compilation.begin()
                self._open = begun.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._times.phase("compile") if self._runner else nullcontext():
            self._open.__exit__(kind, error, trace)

    @property
    def _is_on_gpu(self) -> bool:
        return self._placed.config.device.type == "cuda"

    def _make_steps(self) -> None:
        placed, config = self._placed, self._placed.config
        kv = KVCache(kv_shape(placed.model, config), 2, config.device)
        before = DeviceMemory.now(config.device)
        draft = draft_parts(placed.draft, kv.num_pages, config, from_torch)
        self._runner = ModelRunner(
            placed.model, kv, placed.attention, config, adapters=placed.adapters, draft=draft
        )
        self._sampler = Sampler(self._runner) if placed.model.config.has_lm_head else None
        self._buffers = DeviceMemory.now(config.device).less(before).allocated

    def _try_out(self) -> None:
        """Run something that launches each kernel."""
        runner, done, warm = self._runner, set(), set()
        assert runner is not None
        with runner.graphs.backend.stream():
            _start_libraries(runner)
        with runner.model.one_layer_of_each_kind():
            if self._sampler is not None:
                self._sampler.try_out()  # includes the kernel that takes longest to compile
            for key in runner.graphs.keys:
                kernels = runner.planned.kernels_of(key)
                if kernels not in done:
                    done.add(kernels)
                    warm.add(runner.planned.warmed_with(key))
                    runner.graphs.try_out(key)
            if runner.speculation is not None:
                runner.speculation.try_out()
        self.warm = frozenset(warm)

    def plan(self) -> MemoryPlan:
        """What graphs and buffers will take; after that only compiled kernels are left of the rehearsal."""
        if self._runner is None:
            return MemoryPlan()
        plan = MemoryPlan(self._buffers)
        with self._times.phase("rehearse"):
            if self._placed.config.config.num_pages is None:
                # The engine will allocate these buffers again, after its KV cache.
                self._runner.graphs.take_as_warm(self.warm)
                plan = replace(_trial_capture(self._runner, self._sampler), buffers=self._buffers)
            # A runner and its graphs refer to each other, and what they hold must be freed before anything is
            # sized.
            self._runner = self._sampler = None
            gc.collect()
            torch.cuda.empty_cache()
        kept = DeviceMemory.now(self._placed.config.device).less(self._before)
        return replace(plan, workspace=max(0, kept.allocated))


def _start_libraries(runner: ModelRunner) -> None:
    """Let torch and cuBLAS do their first-run work, a quarter of a second, now and not in the first steps.

    It does not need Triton, which is being imported at the same time.
    """
    ids = torch.zeros(64, dtype=torch.int64, device=runner.lengths.device)
    rows = runner.rows["lengths"].index_select(0, torch.where(ids < 0, ids + 1, ids))
    torch.zeros_like(rows).index_copy_(0, ids, rows.to(torch.int32) * (rows != 0))
    weight = runner.model.embed_tokens.weight
    functional.linear(functional.embedding(ids, weight), weight[: len(ids)])


def _trial_capture(runner: ModelRunner, sampler: Sampler | None) -> MemoryPlan:
    """Capture some graphs of each kind, count their memory, and drop them.

    Other graphs fit into the memory of these; each still takes something outside the pool, estimated from its
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
    """Nodes of the captured graphs, and of all graphs if those of a kind have equally many."""
    found: dict[object, list[int]] = {}
    for key, graph in graphs.graphs.items():
        found.setdefault(_kind(key), []).append(_NODES_OF_AN_EMPTY_GRAPH + (graph.recorded.nodes or 0))
    each = {kind: sum(nodes) / len(nodes) for kind, nodes in found.items()}
    tried = sum(sum(nodes) for nodes in found.values())
    return tried, round(sum(each.get(_kind(key), 0) for key in graphs.keys))


def _pool_bytes(runners: Sequence[CudaGraphRunner]) -> int:
    """What the pool will hold: its whole budget, if that was too small for the largest graphs."""
    pool = runners[0].pool
    is_short = pool.budget is not None and any(graphs.failures for graphs in runners)
    return pool.budget if is_short and pool.budget is not None else pool.bytes


def _growth(graphs: CudaGraphRunner) -> dict[GraphKey, int]:
    """What each graph adds to the pool, by key; empty with a budget, under which the runner measures it."""
    if graphs.pool.budget is not None:
        return {}
    captured = {key: graph.recorded.bytes for key, graph in graphs.graphs.items()}
    return {key: captured.get(key, 0) for key in graphs.keys}
