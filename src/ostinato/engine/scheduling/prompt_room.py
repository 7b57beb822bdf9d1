"""How many tokens of prompts a step takes beside the requests that decode.

Note [Streams beside prompts]
A request that decodes gets its next token when the step ends, so a step full of prompts is a pause in its
stream. Where a time between two tokens is asked for, a step with streams in it takes as many tokens of
prompts as fit into that time by what steps have cost so far (`StepCosts`): up to the largest captured size
that does, so that its graph computes no padding. Without streams a step is as full as it may be.

Nobody starves. Every step takes all decodes along; and prompts get as much time as the decodes beside them,
however little was asked for, and a page of tokens at least.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ostinato.graphs import Ladder
from ostinato.kernels.constants import PAGE_SIZE

from .request import IntArray
from .scheduled_step import ScheduledStep
from .step_costs import StepCosts, StepSize

LEAST_TOKENS = PAGE_SIZE
"""Of prompts in a step."""
LEAST_SHARE = 0.5
"""Of a step's time, for prompts."""


class PromptRoom:
    """Room for tokens of prompts in one step."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        """No more than these are left."""

    def at(self, start: int) -> int:
        """How many more tokens fit of a prompt that goes on at this position."""
        return self.tokens

    def take(self, start: int, count: int) -> None:
        """So many tokens of a prompt, from this position on, are in the step."""
        self.tokens -= count


class TimedRoom(PromptRoom):
    """Room that ends where a step would take too long."""

    def __init__(self, bound: PromptBound, num_decodes: int, contexts: int, tokens: int) -> None:
        super().__init__(tokens)
        self._bound = bound
        self._contexts = contexts
        self._used = num_decodes
        self._pairs = 0.0
        self._offered = 0
        self._least = bound.least_size(num_decodes)
        self._seconds = bound.seconds_for(num_decodes, contexts)

    def at(self, start: int) -> int:
        """How many more tokens fit of a prompt that goes on at this position."""
        sizes = self._bound.sizes
        sizes = sizes[sizes > self._used]
        largest = self._least
        if self._bound.costs.is_known and len(sizes):
            pairs = self._pairs + self._bound.pairs(start, sizes - self._used)
            fitting = self._bound.costs.seconds(sizes, pairs, self._contexts) <= self._seconds
            largest = max(largest, int(sizes[fitting].max(initial=0)))
        self._offered = max(0, min(self.tokens, largest - self._used))
        return self._offered

    def take(self, start: int, count: int) -> None:
        """So many tokens of a prompt, from this position on, are in the step."""
        # Behind a prompt that is cut nobody comes, though the beginning of another one may cost less.
        is_full = count >= self._offered
        self._used += count
        self._pairs += float(self._bound.pairs(start, count))
        self.tokens -= count
        self.tokens = 0 if is_full else self.at(0)


class PromptBound:
    """Bounds prompts by time; see Note [Streams beside prompts]."""

    def __init__(
        self,
        seconds: float,
        costs: StepCosts,
        sizes: Sequence[int],
        *,
        are_captured: bool = True,
        window: int | None = None,
    ) -> None:
        """`seconds`: between two tokens of a stream. `sizes`: of steps that may be chosen, the last one the
        most tokens of a step. `are_captured`: whether a step pays for all of its size. `window`: so many
        tokens a token looks back on at most."""
        self.costs = costs
        self.sizes: IntArray = np.array(sizes)
        self._rungs = Ladder(sizes)
        self._asked = seconds
        self._are_captured = are_captured
        self._window = window

    def room(self, num_decodes: int, contexts: int, tokens: int) -> PromptRoom:
        """For prompts, `tokens` at most, beside so many requests with such contexts, added up."""
        return TimedRoom(self, num_decodes, contexts, tokens)

    def note(self, step: ScheduledStep, seconds: float) -> None:
        """A step took so long."""
        if not step.num_drafts:
            self.costs.note(self.size_of(step), seconds)

    def size_of(self, step: ScheduledStep) -> StepSize:
        """What the time of a step depends on."""
        num_decodes = step.num_requests - len(step.prompt_tokens)
        tokens = step.total_tokens
        if step.prompt_tokens and self._are_captured:
            tokens = self._rung_of(tokens)
        pairs = self.pairs(step.starts[num_decodes:], step.num_new_tokens[num_decodes:])
        return StepSize(tokens, float(pairs.sum()), int(step.starts[:num_decodes].sum()))

    def pairs(self, starts: IntArray | int, counts: IntArray | int) -> IntArray:
        """Keys that so many tokens from there on look at."""
        seen = np.asarray(starts + counts / 2)
        found: IntArray = counts * (seen if self._window is None else np.minimum(seen, self._window))
        return found

    def least_size(self, num_decodes: int) -> int:
        """The smallest step in which prompts get on."""
        return self._rung_of(num_decodes + LEAST_TOKENS)

    def _rung_of(self, tokens: int) -> int:
        return self._rungs.round_up(tokens) or self._rungs.limit

    def seconds_for(self, num_decodes: int, contexts: int) -> float:
        """What a step beside these requests may take."""
        return max(self._asked, self.costs.at_least(num_decodes, contexts) / (1 - LEAST_SHARE))
