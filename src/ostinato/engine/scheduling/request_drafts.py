"""What drafts brought one request: `RequestOutput.metrics.speculative_decoding`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RequestDrafts:
    """Counts, under vLLM's names."""

    num_draft_tokens: int = 0
    """Tokens that were drafted."""
    acceptance_histogram: list[int] = field(default_factory=list)
    """In how many steps 0, 1, 2... drafts were accepted."""
    per_step_drafted: list[int] = field(default_factory=list)
    """Drafts of each step..."""
    per_step_accepted: list[int] = field(default_factory=list)
    """...and how many of them were accepted."""

    @property
    def num_spec_steps(self) -> int:
        """Steps that verified drafts."""
        return sum(self.acceptance_histogram)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that were accepted."""
        return sum(accepted * steps for accepted, steps in enumerate(self.acceptance_histogram))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that such a step brought on average."""
        return 1 + self.num_accepted_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Share of drafts that were accepted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """A step verified so many, and accepted so many."""
        missing = 1 + num_accepted - len(self.acceptance_histogram)
        self.acceptance_histogram.extend([0] * missing)
        self.num_draft_tokens += num_drafts
        self.acceptance_histogram[num_accepted] += 1
        self.per_step_drafted.append(num_drafts)
        self.per_step_accepted.append(num_accepted)

    def join(self, other: RequestDrafts) -> None:
        """Count what drafts brought another completion of the same request."""
        self.num_draft_tokens += other.num_draft_tokens
        self.per_step_drafted += other.per_step_drafted
        self.per_step_accepted += other.per_step_accepted
        missing = len(other.acceptance_histogram) - len(self.acceptance_histogram)
        self.acceptance_histogram.extend([0] * missing)
        for accepted, steps in enumerate(other.acceptance_histogram):
            self.acceptance_histogram[accepted] += steps
