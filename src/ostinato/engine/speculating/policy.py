"""How many drafts a step verifies.

Note [Worth of drafts]
A step of k drafts gives a request 1 + c1 + c1 c2 + ... + c1...ck tokens on average, where ci is the chance
that draft i is accepted given that all before it were. Its cost is the device time of earlier steps with as
many requests and drafts. Both are moving averages; the number of drafts, 0 included, with the most tokens
per time is chosen. The maximum and 0 are tried first; costs never measured are interpolated between those
that were.

A decision stands for a few steps, and another number must be better by more than noise. Now and then a
neighbouring number is tried for a few steps: nothing else shows the acceptance of later drafts, or of any if
none are made. Such trials become rarer as long as they change nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ostinato.graphs import Ladder

from ..scheduling.request import IntArray
from .config import SpeculativeConfig, draft_tiers

FIRST_CHANCE = 0.7
"""Of a draft, before any was seen."""
MEMORY = 64.0
"""Verifications that count in an average."""
COST_MEMORY = 16.0
"""Steps that count in an average cost."""
STEPS = 8
"""How many steps a decision stands."""
MARGIN = 1.03
"""Another number of drafts must be better by this factor."""
FIRST_TRIAL, LAST_TRIAL = 256, 8192
"""Steps between two trials, at first and at most."""


@dataclass
class _Rung:
    """What is known about batches of one size."""

    chosen: int
    costs: dict[int, float] = field(default_factory=dict)
    """Seconds, by number of drafts."""
    num_measured: Counter[int] = field(default_factory=Counter)
    """Over how many steps."""
    current: int = 0
    """Drafts of the steps being scheduled: the chosen number, or a trial."""
    left: int = 0
    """Steps until the next decision."""
    quiet: int = 0
    """Steps since the last trial."""
    interval: int = FIRST_TRIAL
    """Steps between two trials."""
    tries_up: bool = True
    """The direction of the next trial."""


class DraftPolicy:
    """Chooses by the batch, the schedule, and the gain and cost of earlier drafts."""

    def __init__(self, config: SpeculativeConfig, ladder: Ladder) -> None:
        self._config = config
        self._sizes = list(ladder)
        self._tiers = (0, *draft_tiers(config))
        self._is_adaptive = config.schedule is None and not config.disable_adaptive
        self._chances = np.full(config.num_speculative_tokens, FIRST_CHANCE)
        self._weights = np.zeros(config.num_speculative_tokens)
        self._rungs: dict[int, _Rung] = {}
        self.steps_without: Counter[str] = Counter()
        """Steps that had no drafts, by reason."""

    def choose(self, num_requests: int, num_drafting: int) -> int:
        """The number of drafts for a batch of `num_requests`, of which `num_drafting` can accept drafts."""
        if not num_drafting:
            return self._none("no request can accept drafts")
        if num_requests > self._sizes[-1]:
            return self._none("larger batch than max_speculative_requests")
        scheduled = self._config.scheduled(num_requests)
        if scheduled is not None:
            return scheduled or self._none("num_speculative_tokens_per_batch_size")
        if not self._is_adaptive:
            return self._config.num_speculative_tokens
        rung = self._rung(num_requests)
        if not rung.left:
            self._decide(rung, num_drafting / num_requests)
        rung.left -= 1
        if rung.current:
            return rung.current
        return self._none("tried without drafts" if rung.chosen else "drafts cost more than they bring")

    def note(self, num_drafts: int, accepted: IntArray) -> None:
        """A step verified `num_drafts` drafts of some requests; `accepted`: how many of each."""
        # Draft i was tested if all before it were accepted.
        reached = (accepted[:, None] >= np.arange(num_drafts + 1)).sum(0)
        for at in range(num_drafts):
            tried, taken = int(reached[at]), int(reached[at + 1])
            if tried:
                weight = min(self._weights[at], MEMORY)
                self._chances[at] = (self._chances[at] * weight + taken) / (weight + tried)
                self._weights[at] = weight + tried

    def note_cost(self, num_requests: int, num_drafts: int, seconds: float) -> None:
        """A step with this many requests and drafts took `seconds` on the device."""
        if not self._is_adaptive or num_requests > self._sizes[-1]:
            return
        rung = self._rung(num_requests)
        rung.num_measured[num_drafts] += 1
        known = rung.costs.get(num_drafts, seconds)
        weight = min(rung.num_measured[num_drafts], COST_MEMORY)
        # A step that was delayed by something else counts as at most twice the average.
        rung.costs[num_drafts] = known + (min(seconds, 2 * known) - known) / weight

    def expected_tokens(self, num_drafts: int) -> float:
        """Tokens that a step with this many drafts gives a request on average."""
        return 1.0 + float(self._chances[:num_drafts].cumprod().sum())

    def speed_up(self, num_requests: int) -> float | None:
        """Tokens per second with drafts over those without, for batches of this size; None: not known yet."""
        rung = self._rung(num_requests)
        if not self._is_adaptive or 0 not in rung.costs or rung.chosen not in rung.costs:
            return None
        return self.expected_tokens(rung.chosen) * rung.costs[0] / rung.costs[rung.chosen]

    @property
    def chosen(self) -> dict[int, int]:
        """Drafts per step at present, for the batch sizes that were served."""
        return {size: rung.chosen for size, rung in sorted(self._rungs.items())}

    def _none(self, why: str) -> int:
        self.steps_without[why] += 1
        return 0

    def _rung(self, num_requests: int) -> _Rung:
        size = self._sizes[min(bisect_left(self._sizes, num_requests), len(self._sizes) - 1)]
        return self._rungs.setdefault(size, _Rung(self._tiers[-1]))

    def _decide(self, rung: _Rung, share: float) -> None:
        rung.left = STEPS
        if missing := [count for count in (self._tiers[-1], 0) if count not in rung.costs]:
            rung.current = missing[0]
            return
        worth = {count: self._worth(rung, count, share) for count in self._tiers}
        best = max(self._tiers, key=worth.__getitem__)
        if worth[best] > MARGIN * worth[rung.chosen]:
            rung.chosen, rung.interval = best, FIRST_TRIAL
        rung.current = rung.chosen
        rung.quiet += STEPS
        if rung.quiet >= rung.interval:
            rung.current = self._trial(rung)

    def _trial(self, rung: _Rung) -> int:
        rung.quiet, rung.interval = 0, min(2 * rung.interval, LAST_TRIAL)
        at = self._tiers.index(rung.chosen)
        up = rung.tries_up if 0 < at < len(self._tiers) - 1 else at == 0
        rung.tries_up = not rung.tries_up
        return self._tiers[at + 1 if up else at - 1]

    def _worth(self, rung: _Rung, num_drafts: int, share: float) -> float:
        """Tokens per time; `share` of the requests can accept drafts."""
        tokens = 1.0 + share * (self.expected_tokens(num_drafts) - 1.0)
        return tokens / self._cost(rung, num_drafts)

    def _cost(self, rung: _Rung, num_drafts: int) -> float:
        measured = sorted(rung.costs)
        return float(np.interp(num_drafts, measured, [rung.costs[count] for count in measured]))
