"""`LLM.get_metrics`: what the engine has counted, as objects with vLLM's names.

The names are vLLM's even if the server has another `--metrics-prefix`: scripts look for these names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..delivery.request_counts import Buckets
from ..text_engine import TextEngine

PREFIX = "vllm:"


@dataclass
class Metric:
    """A counted or measured quantity."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class Counter(Metric):
    """A number that only increases."""

    value: int = 0


@dataclass
class Vector(Metric):
    """A list of numbers that only increase: drafts accepted at each position."""

    values: list[int] = field(default_factory=list)


@dataclass
class Gauge(Metric):
    """A current value."""

    value: float = 0.0


@dataclass
class Histogram(Metric):
    """How many values up to each bound were seen; `+Inf` counts all."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


def metrics_of(engine: TextEngine, model_name: str | None = None) -> list[Metric]:
    """The current values of all metrics."""
    found = [*_gauges(engine), *_counters(engine), *_drafts(engine), *_histograms(engine)]
    labels = {"model_name": model_name or engine.core.loaded.directory.name, "engine": "0"}
    for metric in found:
        metric.labels = {**labels, **metric.labels}
    return found


def _gauges(engine: TextEngine) -> list[Metric]:
    scheduler = engine.core.scheduler
    pages = scheduler.pages
    values = {
        "num_requests_running": len(scheduler.running),
        "num_requests_waiting": len(scheduler.waiting),
        "kv_cache_usage_perc": (pages.num_usable - pages.num_free) / pages.num_usable,
    }
    return [Gauge(f"{PREFIX}{name}", {}, float(value)) for name, value in values.items()]


def _counters(engine: TextEngine) -> list[Metric]:
    counts, scheduler = engine.counts, engine.core.scheduler
    lookups = scheduler.pages.statistics
    values = {
        "num_preemptions": scheduler.num_preemptions,
        "prefix_cache_queries": lookups.queried_tokens,
        "prefix_cache_hits": lookups.hit_tokens,
        "prompt_tokens": counts.prompt_tokens,
        "generation_tokens": counts.generation_tokens,
    }
    plain = [Counter(f"{PREFIX}{name}", {}, value) for name, value in values.items()]
    reasons = ("stop", "length", "abort", "error")
    return [
        *plain,
        *(
            Counter(
                f"{PREFIX}request_success",
                {"finished_reason": reason},
                counts.finished[reason],
            )
            for reason in reasons
        ),
    ]


def _drafts(engine: TextEngine) -> list[Metric]:
    """Metrics of speculation, if tokens are drafted."""
    speculation = engine.core.runner.speculation
    if speculation is None:
        return []
    found, name = speculation.counts.read(), f"{PREFIX}spec_decode_num"
    return [
        Counter(f"{name}_drafts", {}, found.num_drafts),
        Counter(f"{name}_draft_tokens", {}, found.num_draft_tokens),
        Counter(f"{name}_accepted_tokens", {}, found.num_accepted_tokens),
        Vector(f"{name}_accepted_tokens_per_pos", {}, list(found.accepted_per_position)),
    ]


def _histograms(engine: TextEngine) -> list[Metric]:
    counts = engine.counts
    found = {
        "request_prompt_tokens": counts.prompt_lengths,
        "request_generation_tokens": counts.output_lengths,
        "time_to_first_token_seconds": counts.first_token_seconds,
        "request_time_per_output_token_seconds": counts.per_token_seconds,
        "e2e_request_latency_seconds": counts.whole_seconds,
        "request_queue_time_seconds": counts.queue_seconds,
        "request_decode_time_seconds": counts.decode_seconds,
    }
    return [_histogram(f"{PREFIX}{name}", {}, buckets) for name, buckets in found.items()]


def _histogram(name: str, labels: dict[str, str], buckets: Buckets) -> Histogram:
    counted = {bound: int(value) for bound, value in buckets.cumulative}
    return Histogram(name, labels, buckets.count, buckets.sum, counted)
