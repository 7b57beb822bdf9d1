"""The engine's counters as one message, taken between two steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ostinato.engine.llm import LLM
from ostinato.engine.scheduling.request import Request
from ostinato.engine.speculating.counts import SpeculationReport
from ostinato.graphs import Report

from ..wire.messages import DraftCounters, GraphCounters, Statistics
from .intake import Intake
from .utilization import UtilizationClock


class StatisticsTaker:
    """Reads what the engine counts, and measures what it does not."""

    def __init__(self, llm: LLM, intake: Intake) -> None:
        self._llm, self._intake = llm, intake
        self._busy_seconds = 0.0
        self._taken_at = time.perf_counter()
        self._device_clock = UtilizationClock.of(llm.engine.core.config.device)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around every step of the engine."""
        began = time.perf_counter()
        yield
        self._busy_seconds += time.perf_counter() - began

    def take(self) -> Statistics:
        """All counters as they are now."""
        llm, core = self._llm, self._llm.engine.core
        scheduler, pages = core.scheduler, core.scheduler.pages
        report, sampling = llm.graph_report(), llm.sampling_report()
        times = llm.step_times()
        return Statistics(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting + len(self._intake),
            is_paused=scheduler.is_paused,
            pages_usable=pages.num_usable,
            pages_free=pages.num_free,
            pages_cached=pages.num_cached,
            prefix_queried_tokens=pages.statistics.queried_tokens,
            prefix_hit_tokens=pages.statistics.hit_tokens,
            preemptions=scheduler.num_preemptions,
            steps=times.steps,
            cpu_microseconds=dict(times.microseconds),
            device_idle_share=self._idle_share(),
            idle_source="host" if self._device_clock is None else "device",
            graph_mode=report.mode,
            backend=report.backend,
            device=report.device,
            graphs=[*_by_rung(report, None), *(_by_rung(sampling, "sampling") if sampling else ())],
            eager_steps=dict(report.eager_steps),
            sampling_eager_steps=dict(sampling.eager_steps) if sampling else {},
            memory_bytes=_taken(llm.memory_report()),
            page_size=pages.page_size,
            device_bytes=_device_bytes(core.config.device),
            max_adapters=core.config.config.adapter_slots if core.adapters is not None else 0,
            running_adapters=_adapters_of(scheduler.running),
            waiting_adapters=sorted(
                {*_adapters_of([*scheduler.waiting, *scheduler.line.waiting]), *self._intake.adapters}
            ),
            drafts=_drafts(llm.speculation_report(), len(scheduler.running)),
        )

    def _idle_share(self) -> float:
        now = time.perf_counter()
        passed, busy = now - self._taken_at, self._busy_seconds
        self._taken_at, self._busy_seconds = now, 0.0
        if self._device_clock is not None:
            return self._device_clock.idle_share
        return min(1.0, max(0.0, 1.0 - busy / passed)) if passed > 0 else 1.0


def _taken(memory: dict[str, int]) -> dict[str, int]:
    """Without what was predicted of it."""
    return {name: size for name, size in memory.items() if not name.startswith("predicted_")}


def _drafts(report: SpeculationReport | None, num_running: int) -> DraftCounters | None:
    if report is None:
        return None
    found = report.drafts
    # Of the smallest captured batch that the running requests fit into.
    speed_up = next((factor for size, factor in report.speed_up.items() if size >= num_running), None)
    return DraftCounters(
        method=report.method,
        num_drafts=found.num_drafts,
        num_draft_tokens=found.num_draft_tokens,
        num_accepted_tokens=found.num_accepted_tokens,
        accepted_per_position=list(found.accepted_per_position),
        mean_acceptance_length=found.mean_acceptance_length,
        speed_up=speed_up,
        steps_without=dict(report.steps_without),
        eager_steps=report.eager_drafts,
    )


def _adapters_of(requests: Iterable[Request]) -> list[str]:
    return sorted({request.adapter.name for request in requests if request.adapter is not None})


def _device_bytes(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    return total, free


def _by_rung(report: Report, kind: str | None) -> list[GraphCounters]:
    """Graphs that differ only in their context bucket count as one rung."""
    rungs: dict[tuple[str, str, int], list[float]] = defaultdict(lambda: [0.0] * 6)
    for row in report.graphs:
        which = kind or ("decode" if row.descriptor.startswith("decode") else "mixed")
        rows = row.replays * row.num_tokens
        sums = rungs[row.mode, which, row.num_tokens]
        counted = (1, row.replays, rows * row.padding_waste, rows, row.bytes, row.capture_ms / 1e3)
        for at, value in enumerate(counted):
            sums[at] += value
    return [
        GraphCounters(
            mode=mode,
            kind=which,
            rung=rung,
            graphs=int(sums[0]),
            replays=int(sums[1]),
            padded_rows=round(sums[2]),
            rows=int(sums[3]),
            bytes=int(sums[4]),
            capture_seconds=sums[5],
        )
        for (mode, which, rung), sums in sorted(rungs.items())
    ]
