"""A histogram that costs a binary search per observation: some are made for every token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic

from ostinato.engine.delivery.request_counts import Buckets

RECENT_SECONDS = 60.0


class Histogram(Buckets):
    """Counts by bucket since the start, and the observations of the last minute for quantiles."""

    def __init__(self, bounds: Sequence[float], recent: int = 2048) -> None:
        """`bounds` are the upper ends of the buckets; `recent`: how many observations are kept."""
        super().__init__(bounds)
        self._recent: deque[tuple[float, float]] = deque(maxlen=recent)

    def observe(self, value: float) -> None:
        """Count one value."""
        super().observe(value)
        self._recent.append((monotonic(), value))

    def quantiles(self, *shares: float) -> list[float | None]:
        """Of the last minute; None where nothing was observed."""
        since = monotonic() - RECENT_SECONDS
        values = sorted(value for at, value in self._recent if at >= since)
        if not values:
            return [None for _ in shares]
        return [values[min(len(values) - 1, int(share * len(values)))] for share in shares]
