"""How many prompt tokens a step takes next to the requests that decode.

Note [Streams beside prompts]
A request that decodes gets its next token when the step ends, so a step full of prompts is a pause in its
stream. If a time between two tokens is configured, a step with streams takes as many prompt tokens as fit
into that time according to the costs of earlier steps (`StepCosts`): up to the largest captured size that
fits, so that its graph computes no padding. Without streams a step is as full as it may be.

Nobody starves. Every step includes all decodes; and prompts get at least as much time as the decodes next to
them, however short the configured time, and at least a page of tokens.
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
"""Prompt tokens in a step."""
LEAST_SHARE = 0.5
"""Of a step's time, for prompts."""


class PromptRoom:
    """Room for prompt tokens in one step."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        """At most this many are left."""

    def at(self, start: int) -> int:
        """How many more tokens fit from a prompt that continues at this position."""
        return self.tokens

    def take(self, start: int, count: int) -> None:
        """Put `count` tokens of a prompt, from this position on, into the step."""
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
        """How many more tokens fit from a prompt that continues at this position."""
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
        """Put `count` tokens of a prompt, from this position on, into the step."""
        # Nothing follows a prompt that is cut, though the beginning of another one might cost less.
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
        """`seconds`: between two tokens of a stream. `sizes`: allowed sizes of steps, the last one being the
        most tokens of a step. `are_captured`: whether a step pays for all of its size. `window`: how many
        tokens a token looks back on at most."""
        self.costs = costs
        self.sizes: IntArray = np.array(sizes)
        self._rungs = Ladder(sizes)
        self._asked = seconds
        self._are_captured = are_captured
        self._window = window

    def room(self, num_decodes: int, contexts: int, tokens: int) -> PromptRoom:
        """For prompts, at most `tokens`, next to this many decoding requests with this total of contexts."""
        return TimedRoom(self, num_decodes, contexts, tokens)

    def note(self, step: ScheduledStep, seconds: float) -> None:
        """Record the duration of a step."""
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
        """Keys that this many tokens from there on attend to."""
        seen = np.asarray(starts + counts / 2)
        found: IntArray = counts * (seen if self._window is None else np.minimum(seen, self._window))
        return found

    def least_size(self, num_decodes: int) -> int:
        """The smallest step in which prompts make progress."""
        return self._rung_of(num_decodes + LEAST_TOKENS)

    def _rung_of(self, tokens: int) -> int:
        return self._rungs.round_up(tokens) or self._rungs.limit

    def seconds_for(self, num_decodes: int, contexts: int) -> float:
        """How long a step with these decoding requests may take."""
        return max(self._asked, self.costs.at_least(num_decodes, contexts) / (1 - LEAST_SHARE))
