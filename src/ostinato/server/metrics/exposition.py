"""The metrics as Prometheus scrapes them.

What vLLM and SGLang measure too carries their names behind the configured prefix, those of both; what only
graphs have is ours.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from .histogram import Histogram

if TYPE_CHECKING:
    from ..service import Service
    from ..wire.messages import DraftCounters, Statistics

OURS = "ostinato:"


def _adapters(statistics: Statistics) -> tuple[str, str]:
    return ",".join(statistics.running_adapters), ",".join(statistics.waiting_adapters)


def registry_of(collector: Collector) -> CollectorRegistry:
    """A registry with this collector alone."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry


class ServerCollector(Collector):
    """Reads the counters when it is scraped; nothing is kept twice."""

    def __init__(self, service: Service) -> None:
        self._service = service
        prefix = service.config.metrics_prefix
        self._shared = prefix if prefix.endswith(("_", ":")) else f"{prefix}:"
        self._model = service.model_name

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now."""
        yield from self._requests()
        yield from self._tenants()
        statistics = self._service.engine.statistics
        if statistics is not None:
            yield from self._engine(statistics)
            yield from self._graphs(statistics)
            if statistics.drafts is not None:
                yield from self._drafts(statistics.drafts)
        yield self._one(GaugeMetricFamily, OURS, "engine_up", "Whether the engine serves.", self._is_up)
        restarts = self._service.engine.restarts
        yield self._one(
            CounterMetricFamily, OURS, "engine_restarts", "Engine processes started again.", restarts
        )

    @property
    def _is_up(self) -> int:
        return int(self._service.health[0])

    # -- as in vLLM and SGLang ---------------------------------------------------------------------

    def _requests(self) -> Iterator[Metric]:
        metrics = self._service.metrics
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", metrics.time_to_first_token),
            ("inter_token_latency_seconds", "Between two tokens.", metrics.inter_token_latency),
            (
                "request_time_per_output_token_seconds",
                "A request's mean time per token behind the first.",
                metrics.time_per_output_token,
            ),
            ("e2e_request_latency_seconds", "From arrival to the end.", metrics.end_to_end),
            ("request_queue_time_seconds", "From arrival to the first step.", metrics.queue_time),
            ("request_prefill_time_seconds", "From the first step to the first token.", metrics.prefill_time),
            ("request_decode_time_seconds", "From the first token to the last.", metrics.decode_time),
            (
                "request_inference_time_seconds",
                "From the first step to the last token.",
                metrics.inference_time,
            ),
            ("queue_time_seconds", "The same as request_queue_time_seconds.", metrics.queue_time),
            ("request_prompt_tokens", "Prompt tokens per request.", metrics.prompt_lengths),
            ("request_generation_tokens", "Generated tokens per request.", metrics.generation_lengths),
            ("request_max_num_generation_tokens", "Generated tokens per answer.", metrics.generation_lengths),
            ("request_prefill_kv_computed_tokens", "Prompt tokens not cached.", metrics.computed_lengths),
            ("request_params_max_tokens", "The max_tokens of requests.", metrics.max_tokens),
            ("request_params_n", "The n of requests.", metrics.n),
            ("iteration_tokens_total", "Tokens that a step brought.", metrics.step_tokens),
        ):
            yield self._histogram(name, text, histogram)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of requests that got a token.", metrics.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", metrics.cached_tokens),
            ("cached_tokens", "The same as prompt_tokens_cached.", metrics.cached_tokens),
            ("generation_tokens", "Generated tokens.", metrics.generation_tokens),
            ("num_requests", "Completions that ended.", sum(metrics.finished.values())),
            ("num_aborted_requests", "Completions that were aborted.", metrics.finished["abort"]),
        ):
            yield self._one(CounterMetricFamily, self._shared, name, text, value)
        yield self._labelled(
            CounterMetricFamily,
            self._shared,
            "request_success",
            "Completions that ended, by reason.",
            ["finished_reason"],
            (((reason,), count) for reason, count in metrics.finished.items()),
        )
        yield self._labelled(
            CounterMetricFamily,
            OURS,
            "http_answers",
            "Answers by endpoint and status.",
            ["path", "status"],
            (((path, str(status)), count) for (path, status), count in metrics.answers.items()),
        )
        text = "Requests refused because the queue was full."
        yield self._one(CounterMetricFamily, OURS, "requests_rejected", text, metrics.rejected)

    def _tenants(self) -> Iterator[Metric]:
        """By the names of keys, and all addresses together."""
        keys = self._service.keys
        running, waiting = Counter[str](), Counter[str]()
        for generation in self._service.generations.values():
            for completion in generation.completions:
                if not completion.is_finished:
                    places = waiting if completion.first_token_at is None else running
                    places[completion.tenant.label] += 1
        labels = [*(tenant.label for tenant in keys.tenants), ""]
        everyone = [(tenant.label, tenant.counts, tenant.quota.refused) for tenant in keys.tenants]
        everyone.append(("", keys.addresses.counts, Counter()))
        for name, text, values in (
            ("tenant_requests_running", "Completions that have begun, by key.", running),
            ("tenant_requests_waiting", "Completions without a token yet, by key.", waiting),
        ):
            found = (((label,), values[label]) for label in labels)
            yield self._labelled(GaugeMetricFamily, OURS, name, text, ["tenant"], found)
        for name, text, field in (
            ("tenant_prompt_tokens", "Prompt tokens of requests, by key.", "prompt_tokens"),
            ("tenant_generation_tokens", "Generated tokens, by key.", "generation_tokens"),
        ):
            totals = (((label,), getattr(counts, field)) for label, counts, _ in everyone)
            yield self._labelled(CounterMetricFamily, OURS, name, text, ["tenant"], totals)
        refused = (
            ((label, reason), count)
            for label, counts, of_quota in everyone
            for reason, count in (counts.refused + of_quota).items()
        )
        text = "Requests that were refused, by key and reason."
        yield self._labelled(
            CounterMetricFamily, OURS, "tenant_requests_refused", text, ["tenant", "reason"], refused
        )
        text = "Whether the file of keys, as it is now, is in force."
        yield self._one(GaugeMetricFamily, OURS, "keys_file_in_force", text, int(keys.is_current))
        text = "How often a changed file of keys could not be used."
        yield self._one(CounterMetricFamily, OURS, "keys_file_errors", text, keys.num_errors)

    def _engine(self, statistics: Statistics) -> Iterator[Metric]:
        used = statistics.pages_usable - statistics.pages_free
        share, size = used / statistics.pages_usable, statistics.page_size
        hits = statistics.prefix_hit_tokens / max(1, statistics.prefix_queried_tokens)
        for name, text, value in (
            ("num_requests_running", "Requests in the batch.", statistics.running),
            ("num_running_reqs", "The same as num_requests_running.", statistics.running),
            ("num_requests_waiting", "Requests that wait for their turn.", statistics.waiting),
            ("num_queue_reqs", "The same as num_requests_waiting.", statistics.waiting),
            ("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", share),
            ("token_usage", "The same as kv_cache_usage_perc.", share),
            ("num_used_tokens", "Tokens that KV pages in use hold.", used * size),
            (
                "max_total_num_tokens",
                "Tokens that all KV pages have room for.",
                statistics.pages_usable * size,
            ),
            ("cache_hit_rate", "Share of prompt tokens found in the prefix cache.", hits),
            ("gen_throughput", "Generated tokens per second, now.", self._service.history.rates[0]),
        ):
            yield self._one(GaugeMetricFamily, self._shared, name, text, value)
        if statistics.max_adapters:
            yield self._labelled(
                GaugeMetricFamily,
                self._shared,
                "lora_requests_info",
                "Adapters of running and of waiting requests; the value is the time.",
                ["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
                [((str(statistics.max_adapters), *_adapters(statistics)), time.time())],
            )
        for name, text, value in (
            ("num_preemptions", "Requests that lost their pages.", statistics.preemptions),
            ("num_retracted_requests", "The same as num_preemptions.", statistics.preemptions),
            ("prefix_cache_queries", "Tokens looked up.", statistics.prefix_queried_tokens),
            ("prefix_cache_hits", "Of those, tokens found.", statistics.prefix_hit_tokens),
        ):
            yield self._one(CounterMetricFamily, self._shared, name, text, value)

    def _drafts(self, drafts: DraftCounters) -> Iterator[Metric]:
        rate = drafts.num_accepted_tokens / max(1, drafts.num_draft_tokens)
        for name, text, value in (
            ("num_drafts", "Verifications of drafts.", drafts.num_drafts),
            ("num_draft_tokens", "Tokens that were drafted.", drafts.num_draft_tokens),
            ("num_accepted_tokens", "Of those, tokens that were accepted.", drafts.num_accepted_tokens),
        ):
            yield self._one(CounterMetricFamily, self._shared, f"spec_decode_{name}", text, value)
        yield self._labelled(
            CounterMetricFamily,
            self._shared,
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were accepted, by position.",
            ["position"],
            (((str(at),), count) for at, count in enumerate(drafts.accepted_per_position)),
        )
        text = "Tokens that a verification brings."
        length = drafts.mean_acceptance_length
        yield self._one(GaugeMetricFamily, self._shared, "spec_accept_length", text, length)
        yield self._one(
            GaugeMetricFamily, self._shared, "spec_accept_rate", "Share of drafts accepted.", rate
        )
        yield self._labelled(
            CounterMetricFamily,
            OURS,
            "steps_without_drafts",
            "Decode steps without drafts, by reason.",
            ["reason"],
            (((reason,), count) for reason, count in drafts.steps_without.items()),
        )
        if drafts.speed_up is not None:
            text = "How much faster drafts make a batch of the present size."
            yield self._one(GaugeMetricFamily, OURS, "drafts_speed_up", text, drafts.speed_up)

    # -- ours --------------------------------------------------------------------------------------

    def _graphs(self, statistics: Statistics) -> Iterator[Metric]:
        rungs = [((rung.mode, rung.kind, str(rung.rung)), rung) for rung in statistics.graphs]
        labels = ["mode", "kind", "rung"]
        counters = (
            ("graph_replays", "Replays by mode and rung.", "replays"),
            ("graph_rows", "Rows replayed, padding included.", "rows"),
            ("graph_padded_rows", "Rows replayed that were padding.", "padded_rows"),
        )
        for name, text, field in counters:
            values = ((key, getattr(rung, field)) for key, rung in rungs)
            yield self._labelled(CounterMetricFamily, OURS, name, text, labels, values)
        gauges = (
            ("graph_memory_bytes", "How much the pool grew for a rung.", "bytes"),
            ("graph_capture_seconds", "Time to capture a rung.", "capture_seconds"),
            ("graphs", "Graphs of a rung.", "graphs"),
        )
        for name, text, field in gauges:
            values = ((key, getattr(rung, field)) for key, rung in rungs)
            yield self._labelled(GaugeMetricFamily, OURS, name, text, labels, values)
        eager = [(("forward", reason), count) for reason, count in statistics.eager_steps.items()]
        eager += [(("sampling", reason), count) for reason, count in statistics.sampling_eager_steps.items()]
        if statistics.drafts is not None:
            eager += [(("drafts", reason), count) for reason, count in statistics.drafts.eager_steps.items()]
        text = "Steps without a graph, by reason."
        yield self._labelled(CounterMetricFamily, OURS, "eager_steps", text, ["stage", "reason"], eager)
        yield self._one(CounterMetricFamily, OURS, "steps", "Steps of the engine.", statistics.steps)
        yield self._labelled(
            CounterMetricFamily,
            OURS,
            "step_cpu_microseconds",
            "CPU time of the engine's thread by part of a step; divide by steps.",
            ["part"],
            (((part,), value) for part, value in statistics.cpu_microseconds.items()),
        )
        yield self._labelled(
            GaugeMetricFamily,
            OURS,
            "device_idle_share",
            "Share of the last interval in which the device did nothing.",
            ["source"],
            [((statistics.idle_source,), statistics.device_idle_share)],
        )
        yield self._labelled(
            GaugeMetricFamily,
            OURS,
            "memory_bytes",
            "Memory of the device by what it is for.",
            ["kind"],
            (((kind,), value) for kind, value in statistics.memory_bytes.items()),
        )

    # -- families ----------------------------------------------------------------------------------

    def _one(
        self,
        family: type[CounterMetricFamily] | type[GaugeMetricFamily],
        prefix: str,
        name: str,
        text: str,
        value: float,
    ) -> Metric:
        return self._labelled(family, prefix, name, text, [], [((), value)])

    def _labelled(
        self,
        family: type[CounterMetricFamily] | type[GaugeMetricFamily],
        prefix: str,
        name: str,
        text: str,
        labels: list[str],
        values: Iterable[tuple[tuple[str, ...], float]],
    ) -> Metric:
        metric = family(f"{prefix}{name}", text, labels=["model_name", *labels])
        for key, value in values:
            metric.add_metric([self._model, *key], value)
        return metric

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        metric = HistogramMetricFamily(f"{self._shared}{name}", text, labels=["model_name"])
        metric.add_metric([self._model], histogram.cumulative, histogram.sum)
        return metric
