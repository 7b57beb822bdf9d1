"""How many tokens were drafted, and how many of them accepted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..scheduling.request import IntArray


@dataclass(frozen=True)
class DraftReport:
    """What came of drafts since the start."""

    num_drafts: int
    """Verifications, one for each request of each step."""
    num_draft_tokens: int
    """Tokens that were drafted."""
    num_accepted_tokens: int
    """Of these."""
    accepted_per_position: tuple[int, ...]
    """How often the first draft was accepted, the second..."""
    drafted_per_position: tuple[int, ...]
    """How often there was one."""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a verification brings on average, 1 without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Share of drafts that were accepted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


class DraftCounts:
    """Counts them."""

    def __init__(self, max_drafts: int) -> None:
        self._num_drafts = 0
        self._accepted = np.zeros(max_drafts, dtype=np.int64)
        self._drafted = np.zeros(max_drafts, dtype=np.int64)

    def add(self, num_drafts: int, accepted: IntArray) -> None:
        """Verifications of so many drafts, and how many of them each accepted."""
        self._num_drafts += len(accepted)
        self._drafted[:num_drafts] += len(accepted)
        self._accepted[:num_drafts] += (accepted[:, None] > np.arange(num_drafts)).sum(0)

    def read(self) -> DraftReport:
        """The totals so far."""
        return DraftReport(
            self._num_drafts,
            int(self._drafted.sum()),
            int(self._accepted.sum()),
            tuple(self._accepted.tolist()),
            tuple(self._drafted.tolist()),
        )
