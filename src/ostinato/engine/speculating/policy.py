"""How many drafts a step verifies."""

from __future__ import annotations

from ostinato.graphs import Ladder

from ..scheduling.request import IntArray
from .config import SpeculativeConfig


class DraftPolicy:
    """Decides it from the batch, the schedule, and what earlier drafts brought and cost."""

    def __init__(self, config: SpeculativeConfig, ladder: Ladder) -> None:
        self._config = config
        self._limit = ladder.limit

    def choose(self, num_requests: int, num_drafting: int) -> int:
        """For a batch of so many requests, of which so many can accept drafts."""
        if not num_drafting or num_requests > self._limit:
            return 0
        scheduled = self._config.scheduled(num_requests)
        return self._config.num_speculative_tokens if scheduled is None else scheduled

    def note(self, num_drafts: int, accepted: IntArray) -> None:
        """A step verified so many drafts of each request, and accepted so many."""
