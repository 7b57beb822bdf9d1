"""Decides what each step computes: continuous batching over paged memory, one step ahead of the device.

The parts, each with its own books; this file calls them in order:

    waiting_requests  requests without a row, and why    admission   prompts: who enters, and how much
    running_requests  requests with a row                preemption  pages for decodes, taken if necessary
    step_maker        steps as arrays                    landing     steps in flight, and their results
    fair_shares       shares of tenants, if there are several

Note [One step ahead]
`schedule` may be called again before the previous step is complete (at most `lookahead` steps). All it needs
to know of an unfinished step is how many tokens it computes and samples, which is known:

    schedule N     request decodes at position 40, its input is token 40, its output token 41 is pending
    schedule N+1   request decodes at position 41; the device finds token 41 in the request's row
    complete N     token 41 arrives: the request goes on, or it is finished, one step late
    schedule N+2   ...
    complete N+1   token 42 arrives; if the request finished at N, it is dropped

A step that verifies drafts gives a request at least one token and as many more as were accepted. That number
is not known when the next step is scheduled, so both steps are given room for all of them (`num_scheduled`),
positions come from the device, and the excess is taken back when the step is complete:

    schedule N     positions 40 to 44: the token at 40 and 4 drafts
    schedule N+1   positions 45 to 49 at most; they begin after what N accepts, which the device knows
    complete N     two drafts were accepted, tokens 41 to 43 arrive: N+1 has positions 43 to 47

A request leaves (finish, abort, preemption) at once, with its row and its pages, though steps in flight
still read and write them. That is sound, because steps run in the order in which they were scheduled: the
next owner of a page or a row uses it in a later step, and writes a slot before it reads it. Committed pages
are full, so no step in flight writes to them. Results for a row that changed hands are dropped
(`RequestRows.tenancy`). A preempted request therefore samples its pending token again: the draw depends only
on seed and position.

Note [Fair order]
First come, first served, in the order of `add`; for several tenants, see Note [Shares of tenants] in
fair_shares.py. Only the first waiting request is ever admitted, and the
victim of a preemption is the youngest running request, which goes to the head of the queue. Hence every
running request is older than every waiting one. Prompts take what the decodes leave of a step, one after the
other, so at most one running request has its prompt partly computed, and it is the youngest.

The oldest of all advances in every step: while its prompt is computed, because it then runs alone and has all
pages; while it decodes, because every step includes all decodes and nobody takes its pages. So it ends,
another becomes the oldest, and nobody starves.

Sleep and flushes take the pages of all requests. If they come faster than a prompt is computed, which then
starts over each time, nobody makes progress. So while steps continue and someone waits, they wait until the
request that was the oldest the last time has got a token or ended (`owes_progress`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ostinato.cache.pages import PageAllocator
from ostinato.grammars.followed_text import FollowedText

from ..adapters.slots import AdapterSlots
from .admission import Admission
from .decode_batch import DecodeBatch
from .drain import Drain
from .fair_shares import FairShares
from .landing import Landing
from .preemption import Preemption, take_row
from .prompt_room import PromptBound
from .request import RESERVED_ROW, FinishReason, IntArray, Request, RequestError, RequestStatus
from .request_queue import RequestQueue
from .running_requests import RunningRequests
from .scheduled_step import CompletedStep, ScheduledStep
from .scheduler_config import SchedulerConfig
from .slot_line import SlotLine
from .step_maker import StepMaker
from .waiting_requests import WaitingRequests


class Scheduler:
    """Waiting and running requests, and what the next step computes."""

    def __init__(
        self,
        config: SchedulerConfig,
        pages: PageAllocator,
        slots: AdapterSlots | None = None,
        choose_drafts: Callable[[IntArray], int] | None = None,
        prompt_bound: PromptBound | None = None,
    ) -> None:
        """Schedule over these pages and adapter slots, which nothing else may use.

        `choose_drafts`: how many drafts, at most `max_drafts`, a step of all decoding requests, in these
        rows, should verify for each. `prompt_bound`: how many prompt tokens a step takes next to streams.
        """
        self.config = config
        self.pages = pages
        self._waiting = WaitingRequests(slots, config.max_running)
        self._running = RunningRequests(config, pages, self._waiting)
        self._preemption = Preemption(pages, self._running, self._waiting)
        self._admission = Admission(config, pages, self._running, self._waiting, prompt_bound)
        self._shares = FairShares(
            self._running,
            self._waiting,
            self._preemption,
            self._admission.lacking_pages,
            config.max_batched_tokens,
        )
        self._landing = Landing(self._running, self.finish)
        self._steps = StepMaker(self._running.rows, config.max_running)
        self.max_len = self._running.max_len
        """The most tokens a request can have: max_model_len, or less if the KV cache is smaller."""
        self.rows = self._running.rows
        self.left_grammars: list[FollowedText] = []
        """Grammars of requests that have ended; the owner of grammars takes them from here."""
        self._unfinished: dict[str, Request] = {}
        self._choose_drafts = choose_drafts
        self._is_paused = False
        self._taken_from: tuple[Request, int] | None = None
        """The oldest request and its length when all last lost their pages."""

    # -- what there is -----------------------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        """Requests with a row, oldest first."""
        return self._running.requests

    @property
    def waiting(self) -> RequestQueue:
        """Requests that wait for a row, oldest first; all younger than the running ones."""
        return self._waiting.turn

    @property
    def parked(self) -> dict[Request, None]:
        """Requests that can neither run nor wait for their turn: their next tokens are not known yet."""
        return self._waiting.parked

    @property
    def line(self) -> SlotLine:
        """Requests that wait for a slot of their adapter."""
        return self._waiting.line

    @property
    def arrivals(self) -> Drain:
        """The current drain: which requests are late, which are held; later ones are announced here."""
        return self._waiting.arrivals

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step incomplete."""
        return bool(self._unfinished or self._landing.in_flight)

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """All requests, wherever they are, in order of arrival."""
        return tuple(self._unfinished.values())

    @property
    def has_more_than_held(self) -> bool:
        """Whether a step could do something if there were no pause."""
        return len(self._unfinished) > len(self.arrivals.held) or bool(self._landing.in_flight)

    @property
    def num_waiting(self) -> int:
        """Requests without a row, whatever they wait for."""
        return len(self._waiting.turn) + self._waiting.num_aside

    def serves(self, tenant: str) -> bool:
        """Whether requests of this tenant run or wait for their turn."""
        return tenant in self._running.num_of or tenant in self._waiting.turn.num_of

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self._preemption.count

    @property
    def num_steps_in_flight(self) -> int:
        """Steps that are scheduled and not complete."""
        return len(self._landing.in_flight)

    @property
    def in_flight(self) -> tuple[ScheduledStep, ...]:
        """These steps, oldest first."""
        return tuple(self._landing.in_flight)

    @property
    def owes_progress(self) -> bool:
        """Whether the oldest request has made no progress since all lost their pages; Note [Fair order]."""
        oldest = self.running[0] if self.running else self.waiting.first
        return oldest is not None and (oldest, oldest.num_tokens) == self._taken_from

    # -- pauses ------------------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """Whether `pause` is in force."""
        return self._is_paused

    def pause(self) -> None:
        """Schedule nothing until `resume`; steps in flight still complete, requests keep their pages."""
        self._waiting.end_drain(self.unfinished)
        self._is_paused = True

    def resume(self) -> None:
        """Continue after `pause`, every request where it was."""
        self._waiting.end_drain(self.unfinished)
        self._is_paused = False

    def drain(self) -> None:
        """Serve present requests to their end, even if they were paused; requests that arrive from now on are
        held until `pause` or `resume`."""
        self.arrivals.begin()
        self._is_paused = False

    @property
    def is_draining(self) -> bool:
        """Whether `drain` is in force."""
        return self.arrivals.is_on

    @property
    def is_drained(self) -> bool:
        """Whether all requests that were there before `drain` have ended."""
        return self.arrivals.is_over(self._unfinished.values())

    # -- requests that come and go -----------------------------------------------------------------

    def add(self, request: Request, *, parked: bool = False) -> None:
        """Queue a request, or park it until `release`. Raises RequestError if it could never run."""
        if request.request_id in self._unfinished:
            raise RequestError(f"request {request.request_id} is already being served: choose another id")
        self._admission.check_fits(request)
        self._unfinished[request.request_id] = request
        if request.adapter is not None:
            request.adapter.num_users += 1
        request.is_late = self.arrivals.is_late
        if parked:
            self._waiting.parked[request] = None
        else:
            self._waiting.queue(request)

    def park(self, request: Request) -> None:
        """Take row and pages from a running request until `release`; it is then computed again."""
        take_row(request, self._running)
        self._waiting.parked[request] = None

    def release(self, request: Request) -> None:
        """A parked request can run: if it has run before, it goes before all that wait."""
        self._waiting.release(request)

    def abort(self, request_id: str) -> bool:
        """End a request now, wherever it is. False if it is unknown or already finished."""
        request = self._unfinished.get(request_id)
        if request is None:
            return False
        self.finish(request, FinishReason.ABORT)
        return True

    def abort_all(self) -> None:
        """End all requests now."""
        for request_id in list(self._unfinished):
            self.abort(request_id)

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
        is_at_fault: bool = False,
    ) -> None:
        """End an unfinished request now; results that steps in flight still compute for it are dropped."""
        assert not request.is_finished, f"request {request.request_id} is already finished"
        if request.status is RequestStatus.RUNNING:
            self._running.move_out(request)
        else:
            self._waiting.remove(request)
        if request.grammar is not None:
            self.left_grammars.append(request.grammar)
        if request.adapter is not None:
            request.adapter.num_users -= 1
        del self._unfinished[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason, request.error = reason, stop_reason, error
        request.is_at_fault = is_at_fault

    def flush_prefix_cache(self, *, computes_again: bool = False) -> None:
        """Forget all cached prefixes (the weights have changed).

        Running requests keep their pages, unless `computes_again`: then they give them back and are computed
        again from their first token.
        """
        if computes_again and self.running:
            self._taken_from = self.running[0], self.running[0].num_tokens
            for request in reversed(self.running.copy()):
                self._preemption.preempt(request)
        self.pages.flush()
        for request in self.running:
            self.rows.never_commit(request.row)

    # -- steps -------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """The next step, to be launched after all earlier ones; None if there is nothing to run now."""
        in_flight = self._landing.in_flight
        assert len(in_flight) <= self.config.lookahead, "complete a step before scheduling another"
        if self._is_paused:
            return None
        running = self._running
        if not self._waiting.shares_are_settled:
            self._shares.make_way()
        batch, may_prompt = running.batch, self._admission.may_prompt
        if batch is not None and batch.steady_steps and not may_prompt:
            num_drafts = self._num_drafts(batch.rows)
            if num_drafts == batch.num_drafts:
                return self._steady_step(batch)
        elif may_prompt or self._choose_drafts is None:
            num_drafts = 0
        else:
            num_drafts = self._num_drafts(running.ready_decodes()[1])
        running.give_back_pages()
        requests, rows = self._decodes(1 + num_drafts)
        chunks = self._admission.chunks(self._admission.room(rows, len(in_flight)))
        if may_prompt and not chunks and (num_drafts := self._num_drafts(rows)):
            # The waiting requests have no room yet: take an ordinary decode step.
            requests, rows = self._decodes(1 + num_drafts)
        if not chunks and not requests:
            return None
        joined, page_updates = tuple(running.joined), running.taken.take_updates()
        if chunks:
            num_drafts = 0  # a preempted request may have returned at once
        shared = running.shared_prefix()
        step = self._steps.step(requests, rows, chunks, joined, page_updates, shared, num_drafts)
        running.advance(step, chunks)
        in_flight.append(step)
        running.look_ahead(step)
        return step

    def _decodes(self, count: int) -> tuple[tuple[Request, ...], IntArray]:
        """The requests that decode in the next step, with room for `count` tokens each; if there is none, it
        is taken from the youngest."""
        requests, rows = self._running.ready_decodes()
        if requests and self._preemption.grow(requests, rows, count):
            return self._running.ready_decodes()
        return requests, rows

    def _num_drafts(self, rows: IntArray) -> int:
        """How many drafts a step of these rows verifies for each."""
        if self._choose_drafts is None or not len(rows):
            return 0
        return self._choose_drafts(rows)

    def _steady_step(self, batch: DecodeBatch) -> ScheduledStep:
        """What `schedule` would return, known beforehand: see Note [Steady steps] in decode_batch."""
        self._running.shared_prefix()
        step = self._steps.steady(batch, self._running.taken.take_updates())
        self._landing.in_flight.append(step)
        return step

    def complete(
        self,
        step: ScheduledStep,
        sampled_tokens: Sequence[int] | IntArray,
        num_new: Sequence[int] | IntArray | None = None,
    ) -> CompletedStep:
        """Process the results of the oldest step in flight: one token per request of the step.

        For a step that verified drafts: [q, R] tokens, and how many of them are new for each request. Tokens
        of requests that do not sample in this step, or have left since, are ignored.
        """
        tokens = np.asarray(sampled_tokens)
        if step.num_drafts:
            return self._landing.complete_verified(step, tokens, np.asarray(num_new))
        return self._landing.complete(step, tokens)

    def fail(self, step: ScheduledStep, error: str) -> tuple[Request, ...]:
        """Instead of `complete`: the step did not run, or ran to an unknown point. Ends its requests with
        `error` and returns them. Pages that others got with it are sent to the device again."""
        return self._landing.fail(step, error)

    def give_up(self, step: ScheduledStep | None, error: str) -> tuple[Request, ...]:
        """Called if `complete` or `fail` of a step itself raised, anywhere: end the step's requests with
        `error`, rebuild all books from what the others have, and return the requests that ended.

        Without a step, if `schedule` raised: end all, and drop what is in flight. Cached prefixes are
        forgotten.
        """
        ended = self.unfinished if step is None else self._landing.concerned_by(step)
        # Requests that were between two places cannot be placed either.
        placed = {*self.running, *self._waiting.everyone, *ended}
        ended += tuple(request for request in self._unfinished.values() if request not in placed)
        for request in ended:
            self._end_abruptly(request, error)
        self._landing.forget(step)
        self._waiting.drop_finished()
        self._running.drop_finished()
        left = (*self.running, *self._waiting.everyone)
        self._unfinished = {request.request_id: request for request in left}
        for adapter in {request.adapter for request in (*ended, *left)} - {None}:
            assert adapter is not None
            adapter.num_users = sum(request.adapter is adapter for request in left)
        return ended

    def _end_abruptly(self, request: Request, error: str) -> None:
        """End a request without updating the books."""
        if request.grammar is not None and request.grammar not in self.left_grammars:
            self.left_grammars.append(request.grammar)
        if request._rows is not None:
            request._settled_output = request.output_ids
        request.row, request._rows = RESERVED_ROW, None
        request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.ERROR
        request.stop_reason, request.error, request.is_at_fault = None, error, False

    def check_integrity(self) -> None:
        """Assert that pages, rows and the order of requests are consistent. For tests and when idle."""
        self._running.check_integrity()
        orders = [request.order for request in (*self.running, *self.waiting)]
        assert orders == sorted(set(orders)), "running requests come before waiting ones, each in order"
        assert len(self._unfinished) == len(orders) + self._waiting.num_aside
