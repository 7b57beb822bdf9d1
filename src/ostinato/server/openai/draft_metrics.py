"""What an answer tells about its drafts, where the server was asked to tell it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ostinato.engine.scheduling.request_drafts import RequestDrafts

from .responses import AcceptedDrafts, AnswerMetrics

Drafts = tuple[list[int], list[int]]
"""Of a completion: drafts of each step that verified some, and how many were accepted."""


@dataclass(frozen=True)
class DraftMetrics:
    """How much is told."""

    kind: str
    """none, summary or detailed."""
    most_drafts: int
    """Of a step."""

    def of(self, completions: Sequence[Drafts | None]) -> AnswerMetrics | msgspec.UnsetType:
        """Of the completions of an answer that is finished; nothing of several, as in vLLM."""
        [first, *others] = completions
        if self.kind == "none" or others or first is None:
            return msgspec.UNSET
        told = RequestDrafts(*first)
        is_detailed = self.kind == "detailed"
        histogram = told.acceptance_histogram
        return AnswerMetrics(
            AcceptedDrafts(
                told.mean_acceptance_length,
                told.draft_acceptance_rate,
                histogram + [0] * (1 + self.most_drafts - len(histogram)),
                told.num_spec_steps,
                told.num_accepted_tokens,
                told.num_draft_tokens,
                self.most_drafts,
                told.per_step_accepted if is_detailed else msgspec.UNSET,
                told.per_step_drafted if is_detailed else msgspec.UNSET,
            )
        )
