"""The drafts of one request: `RequestOutput.metrics.speculative_decoding`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class RequestDrafts:
    """Counts, under vLLM's names."""

    per_step_drafted: list[int] = field(default_factory=list)
    """Drafts of each step that verified some..."""
    per_step_accepted: list[int] = field(default_factory=list)
    """...and how many of them were accepted."""

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that were drafted."""
        return sum(self.per_step_drafted)

    @property
    def acceptance_histogram(self) -> list[int]:
        """In how many steps 0, 1, 2... drafts were accepted."""
        steps = Counter(self.per_step_accepted)
        return [steps[accepted] for accepted in range(1 + max(steps, default=-1))]

    @property
    def num_spec_steps(self) -> int:
        """Steps that verified drafts."""
        return len(self.per_step_accepted)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that were accepted."""
        return sum(self.per_step_accepted)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that such a step produced on average."""
        return 1 + self.num_accepted_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of drafts that were accepted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count a step that verified and accepted this many."""
        self.per_step_drafted.append(num_drafts)
        self.per_step_accepted.append(num_accepted)

    def join(self, other: RequestDrafts) -> None:
        """Add the counts of another completion of the same request."""
        self.per_step_drafted += other.per_step_drafted
        self.per_step_accepted += other.per_step_accepted
