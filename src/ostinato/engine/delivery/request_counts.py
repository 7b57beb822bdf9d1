"""Totals over all requests of an engine, counted when each of them ends.

`Buckets` are histograms that cost a binary search per observation.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence

from ..outputs import RequestOutput, RequestTimes
from ..scheduling.request import Request, RequestStatus


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


_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 30.0, 60.0, 120.0, 300.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class RequestCounts:
    """Counters and histograms over requests; costs nothing per token."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        """Completions by finish reason."""
        self.queue_seconds = Buckets(_SECONDS)
        self.first_token_seconds = Buckets(_SECONDS)
        self.per_token_seconds = Buckets(_SECONDS)
        """Means of requests, without their first tokens."""
        self.decode_seconds = Buckets(_SECONDS)
        self.whole_seconds = Buckets(_SECONDS)
        self.prompt_lengths = Buckets(_TOKENS)
        self.output_lengths = Buckets(_TOKENS)
        self._waiting: deque[tuple[Request, RequestTimes]] = deque()
        self._parked: list[tuple[Request, RequestTimes]] = []
        """The same for requests that may leave the queue out of order: those with grammars, which wait for
        them to be compiled, and those with adapters, which may wait for a slot."""

    def queued(self, request: Request, times: RequestTimes) -> None:
        """A request waits for its first step; the requests of one prompt share their times."""
        if request.grammar is None and request.adapter is None:
            self._waiting.append((request, times))
        else:
            self._parked.append((request, times))

    def began(self, at: float) -> None:
        """Note which requests left the queue in the step that began at `at`; `_waiting` leave in order."""
        while self._waiting and self._waiting[0][0].status is not RequestStatus.WAITING:
            self._note(self._waiting.popleft()[1], at)
        if self._parked:
            still = []
            for request, times in self._parked:
                if request.status is RequestStatus.WAITING:
                    still.append((request, times))
                else:
                    self._note(times, at)
            self._parked = still

    @staticmethod
    def _note(times: RequestTimes, at: float) -> None:
        times.scheduled_ts = times.scheduled_ts or max(at, times.queued_ts)

    def ended(self, output: RequestOutput, prompt_length: int) -> None:
        """Count a request whose completions have all ended."""
        times = output.metrics
        assert times is not None
        lengths = [len(completion.token_ids) for completion in output.outputs]
        times.last_token_ts, times.num_generation_tokens = time.monotonic(), sum(lengths)
        self.prompt_tokens += prompt_length
        self.prompt_lengths.observe(prompt_length)
        self.generation_tokens += sum(lengths)
        for completion in output.outputs:
            self.finished[str(completion.finish_reason)] += 1
        for length in lengths:
            self.output_lengths.observe(length)
        self.whole_seconds.observe(times.last_token_ts - times.queued_ts)
        if times.scheduled_ts:
            self.queue_seconds.observe(times.scheduled_ts - times.queued_ts)
        if times.first_token_ts:
            decoding = times.last_token_ts - times.first_token_ts
            self.first_token_seconds.observe(times.first_token_latency)
            self.decode_seconds.observe(decoding)
            if max(lengths) > 1:
                self.per_token_seconds.observe(decoding / (max(lengths) - 1))
