"""Verifies all graphs of an engine in turn; afterwards everything is as before."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import cache
from typing import Self

import numpy as np
import torch

from ostinato.graphs import AddressError, CapturedGraph, ConfigError, CudaGraphRunner, OstinatoError
from ostinato.graphs.capturing.progress import is_terminal

from ..core import EngineCore
from .borrowed_pages import BorrowedPages, choose_pages
from .expected_results import ExpectedResults, rounding_errors, tolerances
from .made_inputs import ENOUGH_REQUESTS, MadeAdapters, Room, make_requests, num_pages_of
from .outcome import Check, EngineVerification
from .sampling_graphs import SamplingGraphs
from .step_graphs import StepGraphs, check_row_graph

_SHARE_OF_FREE = 0.4
"""The share of the GPU's free memory that copies of pages may take."""


class EngineBusyError(OstinatoError, RuntimeError):
    """An operation needs the engine for itself, but requests are being served."""


def verify(core: EngineCore, *, seed: int = 0, progress: bool | None = None) -> EngineVerification:
    """Launch every graph on made requests and compare the results with the reference. Wrong graphs raise
    nothing here, see `EngineVerification.raise_if_failed`."""
    core.refuse_if_asleep()
    while core.has_work and not core.scheduler.running and not core.scheduler.num_waiting:
        core.step()  # a step launched ahead, for requests that have ended
    if core.has_work:
        running, waiting = len(core.scheduler.running), core.scheduler.num_waiting
        raise EngineBusyError(
            f"verify() uses the rows and pages of requests, but {running} are running and {waiting} waiting: "
            "wait for them or abort them, then call it again"
        )
    graphs = _named_graphs(core)
    if not graphs:
        raise ConfigError("there are no graphs to verify: the engine runs every step eagerly")
    started = time.perf_counter()
    moved = _moved(core, graphs)
    if moved:
        # Launching a graph that reads released memory would prove nothing, and may end the process.
        return EngineVerification(tuple(moved), {}, {}, time.perf_counter() - started, _given_up(core))
    with torch.inference_mode(False), torch.no_grad():
        try:
            return _verify(core, graphs, seed, progress, started)
        finally:
            gc.collect()
            if core.config.device.type == "cuda":
                torch.cuda.empty_cache()


def _verify(
    core: EngineCore,
    graphs: Mapping[str, CapturedGraph],
    seed: int,
    progress: bool | None,
    started: float,
) -> EngineVerification:
    generator = np.random.default_rng(seed)
    runner, sampler = core.runner, core.sampler
    checks: list[Check] = []
    with ExitStack() as stack:
        stack.enter_context(runner.unchanged())
        stack.enter_context(sampler.unchanged() if sampler is not None else nullcontext())
        bar = stack.enter_context(VerifyProgress(len(graphs), progress))
        bar.start("the reference")
        model = core.loaded.model
        requests = make_requests(_room(core), model.config.vocab_size, generator)
        count = num_pages_of(requests)
        pages = BorrowedPages(runner.kv, choose_pages(runner.kv.num_pages, count, generator))
        stack.enter_context(pages.borrowed())
        expected = ExpectedResults(model, requests, pages)
        pages.write_all()
        rounding = rounding_errors(model, requests, core.config.dtype)
        limits = tolerances(rounding, core.config.dtype)
        of_steps = StepGraphs(core, requests, pages, expected, limits, generator)
        with_adapters = ExitStack()
        stack.push(with_adapters)
        of_sampling = SamplingGraphs(core, generator) if sampler is not None else None

        @cache
        def of_adapted_steps() -> StepGraphs:
            """From now on, pages are expected to hold the results with adapters."""
            assert runner.adapters is not None
            rank = core.config.config.max_lora_rank
            made = MadeAdapters(model, runner.adapters, rank, requests, seed)
            with_adapters.enter_context(made.written())
            adapted = ExpectedResults(model, requests, pages, made)
            pages.write_all()
            return StepGraphs(core, requests, pages, adapted, limits, generator, made)

        def steps_of(graph: CapturedGraph) -> StepGraphs:
            return of_adapted_steps() if graph.descriptor.lora else of_steps

        def check(name: str, graph: CapturedGraph) -> Iterator[Check]:
            if runner.rows.scatter.graphs.get(graph.key) is graph:
                return check_row_graph(runner.rows, graph, name, generator)
            if runner.graphs.graphs.get(graph.key) is graph:
                return steps_of(graph).check(graph, name)
            assert sampler is not None
            assert of_sampling is not None
            kinds = sampler.graphs.items()
            [kind] = [kind for kind, owner in kinds if owner.graphs.get(graph.key) is graph]
            return of_sampling.check(kind, graph, name)

        # Graphs with adapters last: they expect other contents in the pages.
        for name, graph in sorted(graphs.items(), key=lambda each: each[1].descriptor.lora):
            bar.start(name)
            try:
                checks += list(check(name, graph))
            except (RuntimeError, IndexError) as error:
                # A graph that reads a wrong place may well read one that does not exist.
                detail = f"{type(error).__name__}: {error}"
                checks.append(Check(name, "a batch", "either", "launch", float("inf"), 0, detail))
                pages.write_all()
            bar.done()
    if any(check.what == "pages of nobody" and not check.passed for check in checks):
        # A graph wrote to pages that were not borrowed: their contents can no longer be trusted.
        core.scheduler.flush_prefix_cache()
    seconds = time.perf_counter() - started
    return EngineVerification(tuple(checks), limits, rounding, seconds, _given_up(core))


def _runners(core: EngineCore) -> dict[str, CudaGraphRunner]:
    """Everything that has graphs, by the prefix of their names."""
    found = {"rows": core.runner.rows.scatter, "": core.runner.graphs}
    if core.sampler is not None:
        found |= {f"sampling {kind.name.lower()}": owner for kind, owner in core.sampler.graphs.items()}
    return found


def _named_graphs(core: EngineCore) -> dict[str, CapturedGraph]:
    """Every graph under a name that says its owner: `full decode 8x1`, `sampling filtered decode 8x1`."""
    named = {}
    for prefix, owner in _runners(core).items():
        for key, graph in owner.graphs.items():
            named[f"{prefix or key.mode} {key.descriptor}"] = graph
    return named


def _given_up(core: EngineCore) -> dict[str, str]:
    return {
        f"{prefix} {graph}".strip(): cause
        for prefix, owner in _runners(core).items()
        for graph, cause in owner.report().failures.items()
    }


def _moved(core: EngineCore, graphs: Mapping[str, CapturedGraph]) -> list[Check]:
    """A failed check for every graph that reads a tensor which has moved."""
    checks = []
    for owner in _runners(core).values():
        try:
            owner.check_addresses()
        except AddressError as error:
            # A forward graph reads all weights and caches; the tensors read are watched per runner.
            theirs = [name for name, graph in graphs.items() if owner.graphs.get(graph.key) is graph]
            checks += [Check(name, "none", "plain", "addresses", 1, 0, str(error)) for name in theirs]
    return checks


def _room(core: EngineCore) -> Room:
    """Number and lengths of requests: enough to fill every graph, without taking long on any machine."""
    config, runner = core.config, core.runner
    descriptors = [key.descriptor for key in runner.graphs.graphs]
    most_requests = max((one.num_reqs for one in descriptors), default=1)
    most_tokens = max((one.num_tokens for one in descriptors), default=1)
    contexts = sorted({one.context for one in descriptors if one.context is not None})
    usable = runner.kv.num_pages - 1
    on_gpu = config.device.type == "cuda"
    if on_gpu:
        # The expected contents are kept next to the pages, and the reference works next to both.
        free, _ = torch.cuda.mem_get_info(config.device)
        usable = min(usable, max(1, int(_SHARE_OF_FREE * free) // runner.kv.shape.bytes_per_page))
    longest = max(1100 if on_gpu else 200, most_tokens // 2 + 53)
    if len(contexts) > 1:
        longest = max(longest, contexts[-2] + 70)  # so that the last bucket is needed
    longest = min(longest, config.max_model_len, core.scheduler.max_len)
    longest = max(longest, max((one.query_len or 1 for one in descriptors), default=1))
    return Room(
        num_requests=min(max(most_requests, ENOUGH_REQUESTS), usable),
        num_pages=usable,
        longest=longest,
        # A third of them decode in a mixed step, perhaps the longest among them; the others must fill it.
        tokens=2 * most_tokens + longest,
    )


class VerifyProgress:
    """Shows which graph is being checked; silent unless shown."""

    def __init__(self, total: int, shown: bool | None) -> None:
        """`shown`: True, False, or None for 'when standard error is a terminal'."""
        self._total = total
        self._shown = is_terminal(sys.stderr) if shown is None else shown

    def __enter__(self) -> Self:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("verifying {task.description:<34}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def start(self, name: str) -> None:
        """This is about to be checked."""
        if self._shown:
            self._bar.update(self._task, description=name)

    def done(self) -> None:
        """A graph was checked."""
        if self._shown:
            self._bar.update(self._task, advance=1)

    def __exit__(self, *exception: object) -> None:
        if self._shown:
            self._bar.stop()
