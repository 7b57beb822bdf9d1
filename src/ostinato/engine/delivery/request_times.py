"""When things happened to a request: `RequestOutput.metrics`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..scheduling.request_drafts import RequestDrafts


@dataclass
class RequestTimes:
    """Under vLLM's names, current and earlier ones. `..._ts` are from a monotonic clock, `..._time` are
    seconds since 1970; 0 and None mean that it has not happened yet."""

    arrival_time: float = field(default_factory=time.time)
    queued_ts: float = field(default_factory=time.monotonic)
    """When it arrived."""
    scheduled_ts: float = 0.0
    """When its first step began."""
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    """When it ended; 0 while it runs."""
    num_generation_tokens: int = 0
    """Over all its completions; counted when it ends."""
    speculative_decoding: RequestDrafts | None = None
    """Counts of drafts over its completions that have ended; None: there were none."""

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token."""
        return max(0.0, self.first_token_ts - self.queued_ts) if self.first_token_ts else 0.0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the first step."""
        return self.scheduled_ts - self.queued_ts if self.scheduled_ts else None

    @property
    def first_scheduled_time(self) -> float | None:
        """When its first step began."""
        return self._as_time(self.scheduled_ts)

    @property
    def first_token_time(self) -> float | None:
        """When its first token came."""
        return self._as_time(self.first_token_ts)

    @property
    def last_token_time(self) -> float | None:
        """When its last token came."""
        return self._as_time(self.last_token_ts)

    @property
    def finished_time(self) -> float | None:
        """When it ended."""
        return self._as_time(self.last_token_ts)

    def _as_time(self, stamp: float) -> float | None:
        return self.arrival_time + stamp - self.queued_ts if stamp else None
