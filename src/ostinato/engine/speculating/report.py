"""What speculation has brought, and where there was none, as a user asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ostinato.graphs import Report

from .counts import DraftReport
from .speculation import Speculation


@dataclass(frozen=True)
class SpeculationReport:
    """Since the start."""

    method: str
    num_speculative_tokens: int
    """The most drafts of a step."""
    drafts: DraftReport
    """How many there were, and how many were accepted."""
    speed_ups: Mapping[int, float]
    """By captured batch size: tokens a second with the number of drafts that is chosen now, by those without
    any, as measured; where both are known."""
    steps_without: Mapping[str, int]
    """Decode steps without drafts, by reason."""
    single_requests: Mapping[str, int]
    """Requests that get one token a step, by what they ask for."""
    graphs: Report
    """Of drafts, and of acceptance where it is one of its own."""

    def __str__(self) -> str:
        found = self.drafts
        positions = ", ".join(
            f"{taken / tried:.0%}"
            for taken, tried in zip(found.accepted_per_position, found.drafted_per_position, strict=True)
            if tried
        )
        lines = [
            f"{self.method}, up to {self.num_speculative_tokens} drafts: {found.num_drafts} verifications, "
            f"{found.mean_acceptance_length:.2f} tokens each; accepted by position: {positions or 'none yet'}"
        ]
        lines += [f"  batches of up to {size}: {factor:.2f} times" for size, factor in self.speed_ups.items()]
        lines += [f"  {count} steps without drafts: {why}" for why, count in self.steps_without.items()]
        lines += [
            f"  {count} requests, one token a step: {why}" for why, count in self.single_requests.items()
        ]
        return "\n".join(lines)


def report_of(speculation: Speculation, sizes: list[int]) -> SpeculationReport:
    """As it is now; `sizes`: captured batches."""
    found = {size: speculation.policy.speed_up(size) for size in sizes}
    return SpeculationReport(
        speculation.config.method,
        speculation.config.num_speculative_tokens,
        speculation.counts.read(),
        {size: factor for size, factor in found.items() if factor is not None},
        dict(speculation.policy.steps_without),
        dict(speculation.single_requests),
        speculation.report(),
    )
