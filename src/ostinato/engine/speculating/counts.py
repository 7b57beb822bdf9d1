"""How many tokens were drafted, and how many of them were accepted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..scheduling.request import IntArray


@dataclass(frozen=True)
class DraftReport:
    """Drafts and their acceptance since the start."""

    num_drafts: int
    """Verifications, one for each request of each step."""
    num_draft_tokens: int
    """Tokens that were drafted."""
    num_accepted_tokens: int
    """How many of these were accepted."""
    accepted_per_position: tuple[int, ...]
    """How often the first draft was accepted, the second..."""
    drafted_per_position: tuple[int, ...]
    """How often there was one."""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens gained by a verification on average, 1 without drafts."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Share of drafts that were accepted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(frozen=True)
class SpeculationReport:
    """What speculation did since the start."""

    method: str
    """The drafting method."""
    drafts: DraftReport
    """What was drafted and accepted."""
    chosen: dict[int, int]
    """Drafts per step at present, by batch size, if decided by measurements."""
    speed_up: dict[int, float]
    """Estimated tokens per second with drafts over those without, by batch size, if both were measured."""
    single_requests: dict[str, int]
    """Requests that get one token a step, by the feature that requires it."""
    steps_without: dict[str, int]
    """Decode steps that had no drafts, by reason."""
    eager_drafts: dict[str, int]
    """Drafts that did not come from a graph, by reason."""
    eager_acceptance: dict[str, int]
    """Acceptance that did not come from a graph, neither the forward graph nor one of its own, by reason."""

    def __str__(self) -> str:
        drafts = self.drafts
        shares = zip(drafts.accepted_per_position, drafts.drafted_per_position, strict=True)
        rates = ", ".join(f"{taken / tried:.0%}" if tried else "-" for taken, tried in shares)
        text = (
            f"speculation by {self.method}: {drafts.num_accepted_tokens:,} of {drafts.num_draft_tokens:,} "
            f"drafts accepted ({rates} by position), {drafts.mean_acceptance_length:.2f} tokens a step"
        )
        for name, counts in (
            ("one token a step", self.single_requests),
            ("steps without drafts", self.steps_without),
            ("drafts without a graph", self.eager_drafts),
            ("acceptance without a graph", self.eager_acceptance),
        ):
            if counts:
                text += f"; {name}: " + ", ".join(f"{why} {count:,}" for why, count in counts.items())
        return text


class DraftCounts:
    """Collects the counts of a `DraftReport`."""

    def __init__(self, max_drafts: int) -> None:
        self._num_drafts = 0
        self._accepted = np.zeros(max_drafts, dtype=np.int64)
        self._drafted = np.zeros(max_drafts, dtype=np.int64)

    def add(self, num_drafts: int, accepted: IntArray) -> None:
        """Note verifications of `num_drafts` drafts, and how many of them each accepted."""
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
