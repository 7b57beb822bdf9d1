"""The numbers of the live page: what the engine counts, and how it is now."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from ..service import Service


class LiveStatistics:
    """Makes snapshots for `/stats`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = monotonic()

    def snapshot(self, after: int | None) -> dict[str, Any]:
        """Everything the page shows; with the history behind sample `after`, if it is asked for."""
        service, metrics = self._service, self._service.metrics
        healthy, state = service.health
        statistics = service.engine.statistics
        ready = service.engine.ready
        generated, prompts = service.history.rates
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
            "history": None if after is None else service.history.after(after),
        }


def _named(quantiles: list[float | None]) -> dict[str, float | None]:
    return dict(zip(("p50", "p95"), quantiles, strict=True))


def _readable(statistics: msgspec.Struct) -> dict[str, Any]:
    """By name: on the wire fields go by position."""
    fields = msgspec.structs.asdict(statistics)
    fields["graphs"] = [msgspec.structs.asdict(rung) for rung in fields["graphs"]]
    if fields["drafts"] is not None:
        fields["drafts"] = msgspec.structs.asdict(fields["drafts"])
    return fields
