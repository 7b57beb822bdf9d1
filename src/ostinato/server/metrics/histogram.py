"""A histogram that costs a binary search per observation: some are made for every token."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from time import monotonic

RECENT_SECONDS = 60.0


class Histogram:
    """Counts by bucket since the start, and the observations of the last minute for quantiles."""

    def __init__(self, bounds: Sequence[float], recent: int = 2048) -> None:
        """`bounds` are the upper ends of the buckets; `recent`: how many observations are kept."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._recent: deque[tuple[float, float]] = deque(maxlen=recent)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
        self._recent.append((monotonic(), value))

    @property
    def count(self) -> int:
        """Observations since the start."""
        return sum(self.counts)

    @property
    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus's buckets: upper end, observations up to it."""
        total, buckets = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return buckets

    def quantiles(self, *shares: float) -> list[float | None]:
        """Of the last minute; None where nothing was observed."""
        since = monotonic() - RECENT_SECONDS
        values = sorted(value for at, value in self._recent if at >= since)
        if not values:
            return [None for _ in shares]
        return [values[min(len(values) - 1, int(share * len(values)))] for share in shares]
