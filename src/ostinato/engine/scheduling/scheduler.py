"""Decides what each step computes: continuous batching over paged memory, one step ahead of the device.

Note [One step ahead]
`schedule` may be called again before the earlier step is complete (`lookahead` steps at most). All it
needs to know of an unfinished step is how many tokens it computes and samples, which is known:

    schedule N     request decodes at position 40, its input is token 40, its output token 41 is pending
    schedule N+1   request decodes at position 41; the device finds token 41 in the request's row
    complete N     token 41 arrives: the request goes on, or it is finished, one step late
    schedule N+2   ...
    complete N+1   token 42 arrives; if the request finished at N, it is dropped

A step that verifies drafts brings a request one token at least and as many more as were accepted. That is not
known when the next step is scheduled, so both are given room for all of them (`num_scheduled`), positions
come from the device, and what was too much is taken back when the step is complete:

    schedule N     positions 40 to 44: the token at 40 and 4 drafts
    schedule N+1   positions 45 to 49 at most; they begin behind what N accepts, which the device knows
    complete N     two drafts were accepted, tokens 41 to 43 arrive: N+1 has positions 43 to 47

A request leaves (finish, abort, preemption) at once, with its row and its pages, though steps in flight
still read and write them. That is sound, because steps run in the order in which they were scheduled:
whoever gets a page or a row next does so in a later step, and writes a slot before it reads it. Committed
pages are full, so no step in flight writes to them. Results for a row that changed hands are dropped
(`RequestRows.tenancy`). A preempted request therefore samples its pending token again: the draw depends
on seed and position only.

Note [Fair order]
First come, first served, by the order of `add`. Only the first waiting request is ever admitted, and the
victim of a preemption is the youngest running one and goes to the head of the queue. Hence every running
request is older than every waiting one. Prompts take what the decodes leave of a step, one after the other,
so at most one running request has its prompt computed in part, and it is the youngest.

The oldest of all advances in every step: if it computes its prompt, for then it runs alone and has all pages;
if it decodes, for every step takes all decodes along and nobody takes its pages. So it ends, another is the
oldest, and nobody starves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ostinato.cache.pages import PageAllocator
from ostinato.grammars.followed_text import FollowedText

from ..adapters.slots import AdapterSlots
from .decode_batch import DecodeBatch
from .prompt_room import PromptBound, PromptRoom
from .request import (
    RESERVED_ROW,
    FinishReason,
    IntArray,
    Request,
    RequestError,
    RequestRows,
    RequestStatus,
)
from .request_pages import RequestPages, longest_request
from .scheduled_step import CompletedStep, FurtherTokens, ScheduledStep
from .scheduler_config import SchedulerConfig
from .slot_line import SlotLine
from .step_maker import StepMaker

_NO_ROWS = np.array([], dtype=np.int32)


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
        """Schedule over these pages, and slots of adapters, which nobody else may use.

        `choose_drafts`: how many drafts, at most `max_drafts`, a step of all that decode, in these rows, is
        to verify for each of them. `prompt_bound`: how much of prompts a step takes beside streams.
        """
        self.config = config
        self.pages = pages
        self.max_len = longest_request(config, pages)
        """The longest a request can get: max_model_len, or less where the KV cache is smaller."""
        self.rows = RequestRows(config.max_running, self.max_len, pages.page_size, config.max_drafts)
        self.waiting: deque[Request] = deque()
        """Requests without a row, oldest first; all younger than the running ones."""
        self.running: list[Request] = []
        """Requests with a row, oldest first."""
        self.parked: dict[Request, None] = {}
        """Requests that can neither run nor wait for their turn: what may come next is not known yet."""
        self.line = SlotLine(slots, config.max_running)
        """Requests that wait for a slot of their adapter; see Note [Adapters and the fair order]."""
        self.held: dict[Request, None] = {}
        """Requests that came during `drain`, oldest first: they do not even wait for their turn."""
        self.left_grammars: list[FollowedText] = []
        """Of requests that have ended; whoever looks after grammars takes them from here."""
        self.num_preemptions = 0
        """Preemptions since the start."""
        self._unfinished: dict[str, Request] = {}
        self._prefilling: Request | None = None
        self._decoding: list[Request] = []
        self._decode_batch: DecodeBatch | None = None
        self._choose_drafts = choose_drafts
        self._prompt_bound = prompt_bound
        self._steps = StepMaker(self.rows, config.max_running)
        self._in_flight: deque[ScheduledStep] = deque()
        # Of the step that landed last, whose requests had not left; `give_up` needs it as it was before.
        self._landed: tuple[ScheduledStep, IntArray] | None = None
        self._joined: list[Request] = []
        self._taken = RequestPages(pages, self.rows, config)
        self._num_added = 0
        self._is_paused = False
        self._is_draining = False
        # Pages come free only when somebody leaves: until then the first in the queue is not tried again.
        self._head_is_blocked = False

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step incomplete."""
        return bool(self._unfinished or self._in_flight)

    @property
    def unfinished(self) -> tuple[Request, ...]:
        """All requests, wherever they are, in the order in which they came."""
        return tuple(self._unfinished.values())

    @property
    def has_more_than_held(self) -> bool:
        """Whether a step could do something, were it not for a pause."""
        return len(self._unfinished) > len(self.held) or bool(self._in_flight)

    @property
    def num_waiting(self) -> int:
        """Requests without a row, whatever they wait for."""
        return len(self.waiting) + len(self.parked) + len(self.held) + len(self.line.waiting)

    @property
    def num_steps_in_flight(self) -> int:
        """Steps that are scheduled and not complete."""
        return len(self._in_flight)

    @property
    def in_flight(self) -> tuple[ScheduledStep, ...]:
        """These steps, the oldest first."""
        return tuple(self._in_flight)

    @property
    def is_paused(self) -> bool:
        """Whether `pause` is in force."""
        return self._is_paused

    def pause(self) -> None:
        """Schedule nothing more until `resume`; steps in flight still complete, requests keep their pages."""
        self._end_drain()
        self._is_paused = True

    def resume(self) -> None:
        """Go on after `pause`, every request where it was."""
        self._end_drain()
        self._is_paused = False

    def drain(self) -> None:
        """Serve those that are there to their end, also if they were paused; whoever comes from now on is
        held until `pause` or `resume`."""
        self._is_draining, self._is_paused = True, False

    @property
    def is_draining(self) -> bool:
        """Whether `drain` is in force."""
        return self._is_draining

    @property
    def is_drained(self) -> bool:
        """Whether all have ended that were there before `drain`."""
        return all(request.is_late for request in self._unfinished.values())

    def _end_drain(self) -> None:
        self._is_draining = False
        for request in self._unfinished.values():
            request.is_late = False
        held, self.held = self.held, {}
        for request in held:
            self._queue(request)

    def add(self, request: Request, *, parked: bool = False) -> None:
        """Queue a request, or park it until `release`; RequestError if it could never run."""
        if request.request_id in self._unfinished:
            raise RequestError(f"request {request.request_id} is being served already: choose another id")
        self._check_fits(request)
        self._unfinished[request.request_id] = request
        if request.adapter is not None:
            request.adapter.num_users += 1
        request.is_late = self._is_draining
        if parked:
            self.parked[request] = None
        else:
            self._queue(request)

    def park(self, request: Request) -> None:
        """Take row and pages from a running request until `release`; it is computed again then."""
        self._leave(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.parked[request] = None

    def release(self, request: Request) -> None:
        """A parked request can run: whoever has run before goes first, of all that wait."""
        del self.parked[request]
        if not request.num_preemptions:
            self._queue(request)
        else:
            self._queue_first(request)

    def _queue_first(self, request: Request) -> None:
        """All that wait are behind it, and get new numbers."""
        behind = list(self.waiting)
        self.waiting.clear()
        self._head_is_blocked = False
        for each in (request, *behind):
            self._queue(each)

    def _queue(self, request: Request) -> None:
        if request.is_late:
            self.held[request] = None
            return
        request.order = self._num_added
        self._num_added += 1
        self.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """End a request now, wherever it is. False if it is unknown or finished already."""
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
        """End an unfinished request now; what steps in flight still compute for it is dropped."""
        assert not request.is_finished, f"request {request.request_id} is finished already"
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        elif request in self.parked:
            del self.parked[request]
        elif request in self.line.waiting:
            self.line.remove(request)
        elif request in self.held:
            del self.held[request]
        else:
            self.waiting.remove(request)
            self._head_is_blocked = False
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
        again from their first token on.
        """
        if computes_again:
            for request in reversed(self.running.copy()):
                self._preempt(request)
        self.pages.flush()
        for request in self.running:
            self.rows.never_commit(request.row)

    def schedule(self) -> ScheduledStep | None:
        """The next step, to be launched behind all earlier ones; None if there is nothing to run now."""
        assert len(self._in_flight) <= self.config.lookahead, "complete a step before scheduling another"
        if self._is_paused:
            return None
        batch, may_prompt = self._decode_batch, self._may_prompt
        if batch is not None and batch.steady_steps and not may_prompt:
            num_drafts = self._num_drafts(batch.rows)
            if num_drafts == batch.num_drafts:
                return self._steady_step(batch)
        elif may_prompt or self._choose_drafts is None:
            num_drafts = 0
        else:
            num_drafts = self._num_drafts(self._ready_decodes()[1])
        if self._taken.give_back(self.running):
            self._head_is_blocked = False
        requests, rows = self._ready_decodes()
        if requests and self._grow(requests, rows, 1 + num_drafts):
            requests, rows = self._ready_decodes()
        chunks = self._prompts(self._prompt_room(rows))
        if not chunks and not requests:
            return None
        joined, page_updates = tuple(self._joined), self._taken.take_updates()
        if chunks:
            num_drafts = 0  # whoever was preempted may have come back at once
        shared = self._shared_prefix()
        step = self._steps.step(requests, rows, chunks, joined, page_updates, shared, num_drafts)
        self._advance(step, chunks)
        return step

    def complete(
        self,
        step: ScheduledStep,
        sampled_tokens: Sequence[int] | IntArray,
        num_new: Sequence[int] | IntArray | None = None,
    ) -> CompletedStep:
        """Take in the results of the oldest step in flight: one token per request of the step.

        Of one that has verified drafts [q, R] tokens, and how many of them are new for each request. Tokens
        of requests that do not sample in this step, or have left since, are ignored.
        """
        tokens = np.asarray(sampled_tokens)
        if step.num_drafts:
            assert tokens.shape == (step.query_len, step.num_requests), "as many tokens as were computed"
            return self._complete_verified(step, tokens, np.asarray(num_new))
        assert tokens.shape == (step.num_requests,), "one token per request of the step"
        # What numpy indexes with; from anything else it makes one, every time.
        rows, counts = step.rows.astype(np.intp), step.num_new_tokens
        accepted = live = self._land(step, rows)
        new = tokens
        if np.count_nonzero(live) < len(live):
            rows, counts, new = rows[live], counts[live], tokens[live]
        computed = self.rows.num_computed[rows] + counts
        self.rows.num_computed[rows] = computed
        if self._taken.commit_full(rows, computed):
            self._head_is_blocked = False

        if not step.is_uniform_decode:
            samples = step.samples[live]
            accepted = live & step.samples
            rows, computed, new = rows[samples], computed[samples], new[samples]
        over, stopped = self.rows.append(rows, computed, new)
        finished = [self._finish_sampled(int(rows[at]), int(new[at]), at in stopped) for at in over]
        finished += self._finish_embeddings(step, live)
        return CompletedStep(step, tokens, accepted, tuple(finished))

    def _complete_verified(self, step: ScheduledStep, tokens: IntArray, num_new: IntArray) -> CompletedStep:
        places = step.rows.astype(np.intp)
        live = np.flatnonzero(self._land(step, places))
        rows, counts = places[live], num_new[live]
        assert not len(live) or (counts.min() >= 1 and counts.max() <= step.query_len)
        before = self.rows.num_computed[rows]
        rejected = step.query_len - counts
        self.rows.num_scheduled[rows] -= rejected
        self.rows.num_promised[rows] -= rejected
        rounds = self.rows.append_bunch(rows, before + 1, tokens[:, live], counts)
        computed = before.copy()
        for theirs, _, _ in rounds:
            computed[theirs] += 1
        self.rows.num_computed[rows] = computed
        if self._taken.commit_full(rows, computed):
            self._head_is_blocked = False
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
        """Instead of `complete`: the step did not run, or who knows how far. Ends its requests with `error`
        and returns them. Others may have got pages with it: they are told again."""
        self._taken.put_back_updates(step.page_updates)
        failed = tuple(step.requests[at] for at in np.flatnonzero(self._land(step, step.rows)).tolist())
        for request in failed:
            self.finish(request, FinishReason.ERROR, error=error)
        return failed

    def give_up(self, step: ScheduledStep | None, error: str) -> tuple[Request, ...]:
        """Where `complete` or `fail` of a step raised itself, at whatever line: end the step's requests with
        `error`, make all books anew from what the others have, and return those that ended.

        Without a step, for `schedule`: end all, and drop what is in flight. Cached prefixes are forgotten.
        """
        ended = tuple(self._unfinished.values()) if step is None else self._concerned_by(step)
        # Nor does anybody know where those are to go on who were between two places.
        placed = {*self.running, *self.waiting, *self.line.waiting, *self.parked, *self.held, *ended}
        ended += tuple(request for request in self._unfinished.values() if request not in placed)
        for request in ended:
            if request.grammar is not None and request.grammar not in self.left_grammars:
                self.left_grammars.append(request.grammar)
            if request._rows is not None:
                request._settled_output = request.output_ids
            request.row, request._rows = RESERVED_ROW, None
            request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.ERROR
            request.stop_reason, request.error, request.is_at_fault = None, error, False
        self._in_flight = deque(other for other in self._in_flight if step is not None and other is not step)
        self.running = [request for request in self.running if not request.is_finished]
        self.waiting = deque(request for request in self.waiting if not request.is_finished)
        self.parked = {request: None for request in self.parked if not request.is_finished}
        self.held = {request: None for request in self.held if not request.is_finished}
        self.rows.restore(self.running)
        self.line.restore(self.rows.adapter_slots.tolist())
        placed_now = (*self.running, *self.waiting, *self.line.waiting, *self.parked, *self.held)
        self._unfinished = {request.request_id: request for request in placed_now}
        for adapter in {request.adapter for request in (*ended, *placed_now)} - {None}:
            assert adapter is not None
            adapter.num_users = sum(request.adapter is adapter for request in placed_now)
        self._decoding = [request for request in self._decoding if not request.is_finished]
        if self._prefilling is not None and self._prefilling.is_finished:
            self._prefilling = None
        self._decode_batch = None
        self._joined.clear()
        self._taken.restore(self.running)
        self._head_is_blocked = False
        return ended

    def _concerned_by(self, step: ScheduledStep) -> tuple[Request, ...]:
        """The requests of a step that had not left when it landed, or have not if it is still in flight."""
        if self._landed is not None and self._landed[0] is step:
            live = self._landed[1]
        else:
            live = self.rows.tenancy[step.rows] == step.tenancies
        return tuple(step.requests[at] for at in np.flatnonzero(live).tolist())

    def check_integrity(self) -> None:
        """Raise if pages, rows or the order of requests are not as they must be. For tests and when idle."""
        owned = [[page for page in request.pages if page] for request in self.running]
        self.pages.check_integrity(owned, chains_are_whole=self.config.window is None)
        tenants = [request for request in self.rows.requests if request is not None]
        assert sorted(tenants, key=id) == sorted(self.running, key=id), "a row is lost or taken twice"
        assert self.rows.num_free + len(self.running) == self.config.max_running
        assert all(self.rows.requests[request.row] is request for request in self.running)
        orders = [request.order for request in (*self.running, *self.waiting)]
        assert orders == sorted(set(orders)), "running requests come before waiting ones, each in order"
        apart = len(self.parked) + len(self.held) + len(self.line.waiting)
        assert len(self._unfinished) == len(orders) + apart
        self.line.check_integrity(self.rows.adapter_slots.tolist())
        decoding = [request.order for request in self._decoding]
        assert decoding == sorted(decoding), "those that decode are in order"
        assert self._prefilling is None or self._prefilling is self.running[-1], "the youngest prefills"
        for request in self.running:
            assert request.num_scheduled <= len(request.pages) * self.pages.page_size
            assert self.rows.capacity[request.row] == len(request.pages) * self.pages.page_size
            assert request.num_computed <= request.num_scheduled <= request.num_promised
            assert request.num_tokens <= request.num_promised

    def _check_fits(self, request: Request) -> None:
        # A completion needs room for at least one token behind the prompt.
        needed = request.num_prompt_tokens + (not request.is_embedding)
        if needed <= self.max_len:
            return
        by_pages = self.max_len < self.config.max_model_len
        limit = (
            f"the KV cache holds {self.max_len} tokens in all: give it more memory"
            if by_pages
            else f"the model length is {self.max_len}: raise max_model_len, if the model allows it,"
        )
        raise RequestError(
            f"request {request.request_id}: a prompt of {request.num_prompt_tokens} tokens"
            f"{'' if request.is_embedding else ' and at least one more'} cannot fit, {limit}"
            " or shorten the prompt"
        )

    def _end_length(self, request: Request) -> int:
        if request.params is None or request.params.max_tokens is None:
            return self.max_len
        return min(self.max_len, request.num_prompt_tokens + request.params.max_tokens)

    def _ready_decodes(self) -> tuple[tuple[Request, ...], IntArray]:
        """Requests that decode in the next step: all but those whose last token is pending."""
        if not self._decoding:
            return (), _NO_ROWS
        if self._decode_batch is None:
            self._decode_batch = DecodeBatch(self._decoding, self.rows)
        requests, rows = self._decode_batch.requests, self._decode_batch.rows
        ready = self.rows.num_promised[rows] < self.rows.max_tokens[rows]
        if ready.all():
            return requests, rows
        return tuple(requests[at] for at in np.flatnonzero(ready).tolist()), rows[ready]

    def _num_drafts(self, rows: IntArray) -> int:
        """How many drafts a step of these rows verifies for each."""
        if self._choose_drafts is None or not len(rows):
            return 0
        return self._choose_drafts(rows)

    def _shared_prefix(self) -> int:
        """What the decode batch has in common; looked up when the batch has changed, or one of its pages."""
        batch = self._decode_batch
        if batch is None:
            return 0
        if self.config.shared_prefixes and batch.num_twins != self._taken.num_twins:
            batch.shared_prefix = self._taken.shared_prefix(batch.requests)
            batch.num_twins = self._taken.num_twins
        return batch.shared_prefix

    def _grow(self, requests: tuple[Request, ...], rows: IntArray, count: int = 1) -> bool:
        """Give a page to each decoding request that has no room for `count` tokens, at most as many as a page
        has; where none is left, preempt the youngest.

        Whether somebody was preempted: others decode then.
        """
        full = self.rows.num_scheduled[rows] + count > self.rows.capacity[rows]
        if not np.count_nonzero(full):
            return False
        growing = [requests[at] for at in np.flatnonzero(full).tolist()]
        if len(growing) <= self.pages.num_free:
            self._taken.grow(growing, len(self.running))
            return False
        for request in sorted(growing, key=lambda request: request.order):
            # It may have been preempted for an older one, or be the youngest itself.
            while request.row and self.pages.num_free < 1:
                self._preempt(self.running[-1])
            if request.row:
                self._taken.take(request, 1)
        return True

    def _prompt_room(self, rows: IntArray) -> PromptRoom:
        """What the requests that decode, in these rows, leave of a step to prompts."""
        left = self.config.max_batched_tokens - len(rows)
        if self._prompt_bound is None or not self._may_prompt:
            return PromptRoom(left)
        if not len(rows) and not self._has_streams:
            return PromptRoom(left)
        return self._prompt_bound.room(len(rows), int(self.rows.num_scheduled[rows].sum()), left)

    @property
    def _has_streams(self) -> bool:
        """Whether somebody who decodes needs more tokens than are surely under way."""
        if self._decode_batch is None:
            return False
        rows = self._decode_batch.rows
        known = self.rows.num_tokens[rows] + len(self._in_flight)
        return bool((known < self.rows.max_tokens[rows]).any())

    def _prompts(self, room: PromptRoom) -> list[tuple[Request, int]]:
        """Who computes how much of a prompt in the next step, with room for it."""
        return self._continue_prefill(room) + self._admit(room)

    def _continue_prefill(self, room: PromptRoom) -> list[tuple[Request, int]]:
        request = self._prefilling
        if request is None:
            return []
        count = min(request.num_unscheduled, room.at(request.num_scheduled))
        needed = self._taken.missing(request, request.num_scheduled + count)
        if needed > self.pages.num_free:
            # The youngest waits, with what it has, for older ones to leave or to take its pages.
            return []
        self._taken.take(request, needed)
        room.take(request.num_scheduled, count)
        return [(request, count)]

    def _admit(self, room: PromptRoom) -> list[tuple[Request, int]]:
        chunks: list[tuple[Request, int]] = []
        while room.tokens and self.rows.num_free and not self._head_is_blocked:
            if self.line.is_due(self.waiting[0] if self.waiting else None):
                self._queue_first(self.line.recall())
            if not self.waiting:
                break
            request = self.waiting[0]
            if not self.line.admits(request):
                self.line.set_aside(self.waiting.popleft())
                continue
            prefix = self._taken.cached_prefix(request)
            start = len(prefix) * self.pages.page_size
            remaining, most = request.num_tokens - start, room.at(start)
            if not most or (remaining > most and not self.config.chunked_prefill):
                break
            if not self._has_room_for(request, prefix):
                self._head_is_blocked = True
                break
            count = min(remaining, most)
            self._join(request, prefix, count)
            chunks.append((request, count))
            room.take(start, count)
        return chunks

    def _has_room_for(self, request: Request, prefix: IntArray) -> bool:
        """Whether a newcomer fits behind what a running prefill still needs and a page for every decode.

        Admitting one that has to be preempted soon after would compute its prompt twice.
        """
        if not self.running:
            return True
        behind = self._taken.missing_at_once(request, request.num_tokens - len(prefix) * self.pages.page_size)
        needed = behind + self.pages.num_unowned(prefix)
        promised = 0
        if self._prefilling is not None:
            promised = self._taken.missing_at_once(self._prefilling, self._prefilling.num_tokens)
        return needed + promised + len(self._decoding) <= self.pages.num_free

    def _join(self, request: Request, prefix: IntArray, count: int) -> None:
        """Move the first waiting request to the running ones, with pages for its first chunk."""
        assert self.waiting.popleft() is request
        if request.num_preemptions == 0:
            request.num_cached_tokens = len(prefix) * self.pages.page_size
        self.rows.move_in(request, self._end_length(request), self.line.move_in(request))
        self._taken.start(request, prefix, count)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._joined.append(request)

    def _advance(self, step: ScheduledStep, chunks: list[tuple[Request, int]]) -> None:
        """Account for a step that is about to be launched."""
        for request, count in chunks:
            self._prefilling = request if count < request.num_unscheduled else None
            if self._prefilling is None and not request.is_embedding:
                self._decoding.append(request)
                self._decode_batch = None
        self.rows.num_scheduled[step.rows] = step.seq_lens
        self.rows.num_promised[step.rows] += step.samples * step.query_len
        self._joined.clear()
        self._in_flight.append(step)
        if self._decode_batch is not None and step.requests is self._decode_batch.requests:
            self._decode_batch.look_ahead(step.num_drafts)
        elif self._decode_batch is not None:
            self._decode_batch.steady_steps = 0

    @property
    def _may_prompt(self) -> bool:
        """Whether the next step may compute a part of a prompt."""
        if self._prefilling is not None:
            return True
        if not self.rows.num_free or self._head_is_blocked:
            return False
        return bool(self.waiting) or self.line.is_due(None)

    def _steady_step(self, batch: DecodeBatch) -> ScheduledStep:
        """What `schedule` would come to, known beforehand: see Note [Steady steps] in decode_batch."""
        self._shared_prefix()
        step = self._steps.steady(batch, self._taken.take_updates())
        self._in_flight.append(step)
        return step

    def _preempt(self, request: Request) -> None:
        """Take row and pages from the youngest running request; it is computed again later."""
        self._leave(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        if self._prefilling is request:
            self._prefilling = None
        if request in self._decoding:
            self._decoding.remove(request)
            self._decode_batch = None
        self._taken.leave(request)
        self.line.move_out(int(self.rows.adapter_slots[request.row]))
        self.rows.move_out(request)
        self._head_is_blocked = False

    def _land(self, step: ScheduledStep, rows: IntArray) -> IntArray:
        """Take the oldest step out of flight; which of its requests have not left since."""
        assert self._in_flight[0] is step, "steps complete in the order of scheduling"
        live: IntArray
        if self._decode_batch is not None and step.requests is self._decode_batch.requests:
            live = step.samples  # all of them: a batch is made anew when somebody leaves
        else:
            live = self.rows.tenancy[rows] == step.tenancies
        self._landed = step, live
        self._in_flight.popleft()
        return live

    def _finish_sampled(self, row: int, token: int, is_stop: bool) -> Request:
        request = self.rows.requests[row]
        assert request is not None
        if not is_stop:
            self.finish(request, FinishReason.LENGTH)
            return request
        assert request.params is not None
        is_eos = token in request.eos_token_ids and not request.params.ignore_eos
        self.finish(request, FinishReason.STOP, stop_reason=None if is_eos else token)
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
            self.finish(request, FinishReason.STOP)
        return done
