"""A line of throughput every ten seconds while there is any."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

from .log_lines import say

if TYPE_CHECKING:
    from .service import Service

EVERY_SECONDS = 10.0


class ThroughputLog:
    """Looks at the counters of a service and says what has come since it looked last."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._then = monotonic()
        self._counted = (0, 0)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(EVERY_SECONDS)
            if (line := self.line()) is not None:
                say(line)

    def line(self) -> str | None:
        """What happened since the last call; None if nothing did."""
        metrics, now = self._service.metrics, monotonic()
        counted = (metrics.prompt_tokens, metrics.generation_tokens)
        passed, now_in, now_out = (
            now - self._then,
            *(a - b for a, b in zip(counted, self._counted, strict=True)),
        )
        self._then, self._counted = now, counted
        if not (now_in or now_out or self._service.engine.num_unfinished):
            return None
        text = f"{now_out / passed:,.1f} tokens/s out, {now_in / passed:,.1f} in"
        counters = self._service.engine.statistics
        if counters is None:
            return text
        used = 1 - counters.pages_free / max(1, counters.pages_usable)
        hits = counters.prefix_hit_tokens / max(1, counters.prefix_queried_tokens)
        return (
            f"{text}; {counters.running} running, {counters.waiting} waiting; "
            f"KV cache {used:.1%} used, prefix hits {hits:.1%}"
        )
