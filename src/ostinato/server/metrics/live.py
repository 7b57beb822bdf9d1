"""The numbers of the live page: what the engine counts, and rates since the page looked last."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from ..service import Service

RATE_SECONDS = 2.0
"""Rates are over at least this long, whoever asks how often."""


class LiveStatistics:
    """Makes snapshots for `/stats`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = monotonic()
        self._marks: deque[tuple[float, int, int]] = deque()

    def snapshot(self) -> dict[str, Any]:
        """Everything the page shows."""
        service, metrics = self._service, self._service.metrics
        healthy, state = service.health
        statistics = service.engine.statistics
        ready = service.engine.ready
        generated, prompts = self._rates()
        return {
            "state": state,
            "healthy": healthy,
            "progress": service.engine.progress,
            "model": service.model_name,
            "architecture": ready.architecture if ready else None,
            "max_model_len": ready.max_model_len if ready else None,
            "uptime_seconds": monotonic() - self._started,
            "generation_tokens_per_second": generated,
            "prompt_tokens_per_second": prompts,
            "generation_tokens": metrics.generation_tokens,
            "prompt_tokens": metrics.prompt_tokens,
            "finished": dict(metrics.finished),
            "ttft_seconds": _named(metrics.time_to_first_token.quantiles(0.5, 0.95)),
            "tpot_seconds": _named(metrics.inter_token_latency.quantiles(0.5, 0.95)),
            "engine": None if statistics is None else _readable(statistics),
        }

    def _rates(self) -> tuple[float, float]:
        metrics, now = self._service.metrics, monotonic()
        marks = self._marks
        marks.append((now, metrics.generation_tokens, metrics.prompt_tokens))
        while len(marks) > 2 and now - marks[1][0] >= RATE_SECONDS:
            marks.popleft()
        then, generated, prompts = marks[0]
        passed = now - then
        if passed <= 0:
            return 0.0, 0.0
        return (metrics.generation_tokens - generated) / passed, (metrics.prompt_tokens - prompts) / passed


def _named(quantiles: list[float | None]) -> dict[str, float | None]:
    return dict(zip(("p50", "p95"), quantiles, strict=True))


def _readable(statistics: msgspec.Struct) -> dict[str, Any]:
    """By name: on the wire fields go by position."""
    fields = msgspec.structs.asdict(statistics)
    fields["graphs"] = [msgspec.structs.asdict(rung) for rung in fields["graphs"]]
    return fields
