"""Steps in flight, and what happens to requests when a step lands: tokens, ends, or a failure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from .request import FinishReason, IntArray, Request
from .running_requests import RunningRequests
from .scheduled_step import CompletedStep, FurtherTokens, ScheduledStep

_THERE, _GONE = np.ones(1, dtype=bool), np.zeros(1, dtype=bool)
"""Whether the only request of a step is still there."""


class Landing:
    """Landing of one scheduler's steps; see Note [One step ahead] in scheduler.py."""

    def __init__(self, running: RunningRequests, finish: Callable[..., None]) -> None:
        """`finish` is the scheduler's."""
        self.in_flight: deque[ScheduledStep] = deque()
        """Oldest first."""
        self._running, self._rows, self._finish = running, running.rows, finish
        # For the step that landed last: which requests had not left, as `concerned_by` needs it.
        self._landed: tuple[ScheduledStep, IntArray] | None = None

    def complete(self, step: ScheduledStep, tokens: IntArray) -> CompletedStep:
        """The oldest step has produced these tokens: one for each request."""
        assert tokens.shape == (step.num_requests,), "one token per request of the step"
        is_one = step.num_requests == 1
        return self._complete_one(step, tokens) if is_one else self._complete_all(step, tokens)

    def _complete_all(self, step: ScheduledStep, tokens: IntArray) -> CompletedStep:
        # numpy's index type; numpy would convert anything else, every time.
        rows, counts = step.rows.astype(np.intp), step.num_new_tokens
        accepted = live = self._land(step, rows)
        new = tokens
        if np.count_nonzero(live) < len(live):
            rows, counts, new = rows[live], counts[live], tokens[live]
        computed = self._rows.num_computed[rows] + counts
        self._rows.num_computed[rows] = computed
        self._running.commit_full(rows, computed)

        if not step.is_uniform_decode:
            samples = step.samples[live]
            accepted = live & step.samples
            rows, computed, new = rows[samples], computed[samples], new[samples]
        over, stopped = self._rows.append(rows, computed, new)
        finished = [self._finish_sampled(int(rows[at]), int(new[at]), at in stopped) for at in over]
        finished += self._finish_embeddings(step, live)
        return CompletedStep(step, tokens, accepted, tuple(finished))

    def _complete_one(self, step: ScheduledStep, tokens: IntArray) -> CompletedStep:
        """`complete` without arrays of one element, each of which takes as long as ten scalars."""
        row, token = step.rows.item(), int(tokens.item())
        live = self._land(step, step.rows)
        if live is _GONE:
            return CompletedStep(step, tokens, live, ())
        computed = self._rows.num_computed.item(row) + step.num_new_tokens.item()
        self._rows.num_computed[row] = computed
        self._running.commit_full_of(row, computed)
        if not step.samples.item():
            return CompletedStep(step, tokens, _GONE, tuple(self._finish_embeddings(step, live)))
        is_over, is_stop = self._rows.append_one(row, computed, token)
        finished = (self._finish_sampled(row, token, is_stop),) if is_over else ()
        return CompletedStep(step, tokens, live, finished)

    def complete_verified(self, step: ScheduledStep, tokens: IntArray, num_new: IntArray) -> CompletedStep:
        """The oldest step has verified drafts and produced [q, R] tokens, of which `num_new` [R] are new."""
        assert tokens.shape == (step.query_len, step.num_requests), "as many tokens as were computed"
        places = step.rows.astype(np.intp)
        live = np.flatnonzero(self._land(step, places))
        rows, counts = places[live], num_new[live]
        assert not len(live) or (counts.min() >= 1 and counts.max() <= step.query_len)
        before = self._rows.num_computed[rows]
        rejected = step.query_len - counts
        self._rows.num_scheduled[rows] -= rejected
        self._rows.num_promised[rows] -= rejected
        # The draft model has yet to compute what is accepted here, and never will if the request ends: pages
        # are committed only up to where they are complete.
        self._running.commit_full(rows, before)
        rounds = self._rows.append_bunch(rows, before + 1, tokens[:, live], counts)
        computed = before.copy()
        for theirs, _, _ in rounds:
            computed[theirs] += 1
        self._rows.num_computed[rows] = computed
        found = []
        for line, (theirs, over, stopped) in zip(tokens, rounds, strict=False):
            finished = [
                self._finish_sampled(int(rows[at]), int(line[live[at]]), at in stopped) for at in over
            ]
            accepted = np.zeros(step.num_requests, dtype=bool)
            accepted[live[theirs]] = True
            found.append(FurtherTokens(line, accepted, tuple(finished)))
        if not found:
            return CompletedStep(step, tokens[0], np.zeros(step.num_requests, dtype=bool), ())
        return CompletedStep(step, *found[0], tuple(found[1:]))

    def fail(self, step: ScheduledStep, error: str) -> tuple[Request, ...]:
        """The oldest step did not run, or ran to an unknown point: end its requests and return them. Pages
        that others got with it are sent to the device again."""
        self._running.taken.put_back_updates(step.page_updates)
        failed = tuple(step.requests[at] for at in np.flatnonzero(self._land(step, step.rows)).tolist())
        for request in failed:
            self._finish(request, FinishReason.ERROR, error=error)
        return failed

    def concerned_by(self, step: ScheduledStep) -> tuple[Request, ...]:
        """The step's requests that had not left when it landed, or have not left if it is still in flight."""
        if self._landed is not None and self._landed[0] is step:
            live = self._landed[1]
        else:
            live = self._rows.tenancy[step.rows] == step.tenancies
        return tuple(step.requests[at] for at in np.flatnonzero(live).tolist())

    def forget(self, step: ScheduledStep | None) -> None:
        """This step will not land; None: no step will."""
        self.in_flight = deque(other for other in self.in_flight if step is not None and other is not step)

    def _land(self, step: ScheduledStep, rows: IntArray) -> IntArray:
        """Take the oldest step out of flight; returns which of its requests have not left since."""
        assert self.in_flight[0] is step, "steps complete in the order of scheduling"
        batch = self._running.batch
        live: IntArray
        if batch is not None and step.requests is batch.requests:
            live = step.samples  # all of them: a batch is rebuilt when a request leaves
        elif step.num_requests == 1:
            is_there = self._rows.tenancy.item(step.rows.item()) == step.tenancies.item()
            live = _THERE if is_there else _GONE
        else:
            live = self._rows.tenancy[rows] == step.tenancies
        self._landed = step, live
        self.in_flight.popleft()
        return live

    def _finish_sampled(self, row: int, token: int, is_stop: bool) -> Request:
        request = self._rows.requests[row]
        assert request is not None
        if not is_stop:
            self._finish(request, FinishReason.LENGTH)
            return request
        assert request.params is not None
        is_eos = token in request.eos_token_ids and not request.params.ignore_eos
        self._finish(request, FinishReason.STOP, stop_reason=None if is_eos else token)
        return request

    def _finish_embeddings(self, step: ScheduledStep, live: IntArray) -> list[Request]:
        if step.is_uniform_decode:
            return []
        done = [
            request
            for request, is_live in zip(step.requests, live.tolist(), strict=True)
            if is_live and request.is_embedding and request.num_computed == request.num_prompt_tokens
        ]
        for request in done:
            self._finish(request, FinishReason.STOP)
        return done
