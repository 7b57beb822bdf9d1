"""A histogram that costs a binary search per observation."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Buckets:
    """Counts of values by the bucket they fall in, since the start."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the upper ends of the buckets; one more bucket is unbounded."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

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
