"""What the server did, second by second: a page that is opened late shows what came before it."""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic
from typing import Any

from ..engine_client.client import EngineClient
from .request_metrics import RequestMetrics

SECONDS = 1.0
KEPT = 600
"""Samples: the last ten minutes."""

NAMES = (
    *("number", "generation_tokens_per_second", "prompt_tokens_per_second", "ttft_seconds", "tpot_seconds"),
    *("running", "waiting", "kv_share"),
)
"""The columns of a sample. Times are means over its second, null where nothing came."""


class History:
    """Takes a sample every second from the start of the server."""

    def __init__(self, metrics: RequestMetrics, engine: EngineClient) -> None:
        self._metrics, self._engine = metrics, engine
        self._samples: deque[list[float | None]] = deque(maxlen=KEPT)
        self._last: tuple[float, ...] = self._counted()
        self._number = 0

    def start(self) -> None:
        """Take samples from now on, in the running event loop."""
        loop = asyncio.get_running_loop()

        def tick() -> None:
            self.take()
            loop.call_later(SECONDS, tick)

        loop.call_later(SECONDS, tick)

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens per second generated and read, over the last two samples, whoever asks how often."""
        last = list(self._samples)[-2:]
        generated, prompts = (sum(sample[at] or 0.0 for sample in last) for at in (1, 2))
        return generated / max(1, len(last)), prompts / max(1, len(last))

    def take(self) -> None:
        """One sample: what has changed since the last one."""
        counted = self._counted()
        passed, *grown = (now - then for now, then in zip(counted, self._last, strict=True))
        if passed <= 0:
            return
        self._last = counted
        generated, prompts, first_seconds, firsts, between_seconds, betweens = grown
        statistics = self._engine.statistics
        self._samples.append(
            [
                self._number,
                generated / passed,
                prompts / passed,
                first_seconds / firsts if firsts else None,
                between_seconds / betweens if betweens else None,
                statistics.running if statistics else 0,
                statistics.waiting if statistics else 0,
                1 - statistics.pages_free / statistics.pages_usable if statistics else None,
            ]
        )
        self._number += 1

    def after(self, number: int) -> dict[str, Any]:
        """The samples behind the one with this number."""
        samples = [sample for sample in self._samples if (sample[0] or 0) > number]
        return {"seconds": SECONDS, "kept": KEPT, "names": NAMES, "samples": samples}

    def _counted(self) -> tuple[float, ...]:
        metrics = self._metrics
        first, between = metrics.time_to_first_token, metrics.inter_token_latency
        return (
            monotonic(),
            metrics.generation_tokens,
            metrics.prompt_tokens,
            first.sum,
            first.count,
            between.sum,
            between.count,
        )
