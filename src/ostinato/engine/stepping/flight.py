"""A step on its way through the device, and its results after it has landed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..outputs import Logprob
from ..scheduling.request import IntArray, Request
from ..scheduling.scheduled_step import CompletedStep, ScheduledStep
from .prompt_states import PromptStates
from .token_return import Launched, Sampled
from .whole_logprobs import told


class Extras(NamedTuple):
    """What a step gave a request besides its token."""

    logprobs: dict[int, Logprob] | None = None
    """Of that token and of the most likely ones, if requested."""
    prompt_logprobs: dict[int, dict[int, Logprob]] | None = None
    """By position in the prompt, those from this step, if requested; the first token has none."""
    hidden: PromptStates | None = None
    """For an embedding whose prompt is computed: its hidden states."""


class Progress(NamedTuple):
    """The results of one step; if drafts were accepted, a part of them: the next token of each that has
    one."""

    requests: tuple[Request, ...]
    """Those that got a token; the very same tuple as in the step before while nothing changes."""
    tokens: list[int]
    """The token of each."""
    ended: tuple[Request, ...]
    """Those that ended with the step, with a token or without."""
    extras: dict[Request, Extras]
    """For requests that got more than a token, or something else."""

    def without(self, request_id: str) -> Progress:
        """The same without this request."""
        gone = {request for request in self.requests if request.request_id == request_id}
        return Progress(
            *self.without_tokens_of(gone)[:2],
            tuple([request for request in self.ended if request.request_id != request_id]),
            {request: more for request, more in self.extras.items() if request.request_id != request_id},
        )

    def without_tokens_of(self, gone: Collection[Request]) -> Progress:
        """The same, but these requests get no token and no extras."""
        kept = [at for at, request in enumerate(self.requests) if request not in gone]
        if len(kept) == len(self.requests):
            return self
        return Progress(
            tuple([self.requests[at] for at in kept]),
            [self.tokens[at] for at in kept],
            self.ended,
            {request: more for request, more in self.extras.items() if request not in gone},
        )


@dataclass(eq=False)
class Flight:
    """A step from its launch until its results are processed."""

    step: ScheduledStep
    launched: Launched | None = None
    """Its tokens on their way; None if it samples nothing."""
    prompt_logprobs: dict[str, dict[int, dict[int, Logprob]]] = field(default_factory=dict)
    """By request and position."""
    hidden: dict[str, PromptStates] = field(default_factory=dict)
    """By request, for embeddings."""
    constrained: list[int] = field(default_factory=list)
    """Indices of its requests whose tokens follow a grammar."""
    whole_logprobs: dict[int, Tensor] = field(default_factory=dict)
    """By place, for requests that want their whole distribution."""
    follows: bool = False
    """Whether another step was under way when it was launched..."""
    is_timed: bool = False
    """...and the device records when it began."""
    launch_seconds: float = 0.0
    """The duration of its launch: on a CPU that of the whole step."""
    error: str | None = "the step was interrupted before it was launched"
    """Why it was not fully launched, or not read; None once it was launched."""
    landed: tuple[Progress, ...] | None = None
    """Its results, from when they are in the books until `step` returns them."""

    def progress(
        self, done: CompletedStep, sampled: Sampled | None, ended: tuple[Request, ...]
    ) -> tuple[Progress, ...]:
        """Its results, one token of each request after another; `ended`: requests ended by the first ones."""
        extras = self._extras(done, sampled, ended)
        first = Progress(*self._tokens_of(done.tokens, done.accepted), ended, extras)
        if not done.further:
            return (first,)
        further = [
            Progress(*self._tokens_of(each.tokens, each.accepted), each.finished, {}) for each in done.further
        ]
        return (first, *further)

    def _tokens_of(self, tokens: IntArray, accepted: IntArray) -> tuple[tuple[Request, ...], list[int]]:
        requests = self.step.requests
        if np.count_nonzero(accepted) < len(requests):
            places = np.flatnonzero(accepted)
            requests, tokens = tuple([requests[at] for at in places.tolist()]), tokens[places]
        return requests, tokens.tolist()

    def _extras(
        self, done: CompletedStep, sampled: Sampled | None, ended: tuple[Request, ...]
    ) -> dict[Request, Extras]:
        found: dict[Request, Extras] = {}
        # In a decode step only requests that want logprobs can have extras.
        asking = () if sampled is None or sampled.told is None else sampled.told.tolist()
        has_more = self.prompt_logprobs or self.hidden or self.whole_logprobs
        for at in range(self.step.num_requests) if has_more else asking:
            request = self.step.requests[at]
            if request.is_finished and request not in ended:
                continue  # it left while the step was under way
            name = request.request_id
            logprobs = self._logprobs(request, sampled, at) if done.accepted[at] else None
            extras = Extras(logprobs, self.prompt_logprobs.get(name), self.hidden.get(name))
            if any(part is not None for part in extras):
                found[request] = extras
        return found

    def _logprobs(self, request: Request, sampled: Sampled | None, at: int) -> dict[int, Logprob] | None:
        if at not in self.whole_logprobs:
            return _logprobs(request, sampled, at)
        assert sampled is not None
        assert request.params is not None
        return told(self.whole_logprobs[at], int(sampled.tokens[at]), request.params)


def _logprobs(request: Request, sampled: Sampled | None, at: int) -> dict[int, Logprob] | None:
    asked = request.params.logprobs if request.params is not None else None
    if asked is None or sampled is None or sampled.logprobs is None:
        return None
    assert sampled.logprob_tokens is not None
    assert sampled.ranks is not None
    values = sampled.logprobs[at, : asked + 1].tolist()
    tokens = sampled.logprob_tokens[at, : asked + 1].tolist()
    ranks = [int(sampled.ranks[at]), *range(1, asked + 1)]
    # The sampled token comes first and may also be among the most likely.
    found: dict[int, Logprob] = {}
    for token, value, rank in zip(tokens, values, ranks, strict=False):
        found.setdefault(token, Logprob(value, rank))
    return found
