"""The scheduler against a device that notices every wrong page, slot and token.

The fake device keeps its own page table (from the steps' page updates), its own last tokens and a KV memory
of one number per slot. The number at a position is a hash of the number before it, read through the page
table, and of the token; the next token is a hash of all numbers of the request. A page that is wrong, shared
wrongly, not recomputed or overwritten changes every token that follows.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ostinato.cache.pages import PageAllocator
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.engine.scheduling.prompt_room import PromptBound
from ostinato.engine.scheduling.request import FinishReason, Request, RequestError, RequestStatus
from ostinato.engine.scheduling.scheduled_step import PLACEHOLDER, CompletedStep, ScheduledStep
from ostinato.engine.scheduling.scheduler import Scheduler
from ostinato.engine.scheduling.scheduler_config import SchedulerConfig
from ostinato.graphs.errors import ConfigError

GRAMMAR: Any = object()
"""All that the scheduler wants to know of a grammar is whether a request has one."""
FAILURES = ("not at all", "told of pages", "computed")
"""How far a step has got on the device when it fails."""
VOCAB = 12
EOS = frozenset({0})
POISON = 666


def slot_value(before: int, token: int, position: int, weights: int) -> int:
    return hash((before, token, position, weights))


def next_token(values: list[int], weights: int) -> int:
    return hash((tuple(values), weights)) % VOCAB


def run_alone(request: Request, max_len: int, weights: int = 0) -> tuple[list[int], str, int | None]:
    """What a request must give, computed without pages, batches or a scheduler."""
    params = request.params
    if params is None:
        return [], "stop", None
    values: list[int] = []
    tokens: list[int] = list(request.prompt_ids)
    output: list[int] = []
    while True:
        for position in range(len(values), len(tokens)):
            values.append(slot_value(values[-1] if values else 0, tokens[position], position, weights))
        token = next_token(values, weights)
        may_stop = len(output) >= params.min_tokens
        output.append(token)
        tokens.append(token)
        if may_stop and token in request.eos_token_ids and not params.ignore_eos:
            return output, "stop", None
        if may_stop and token in params.stop_token_ids:
            return output, "stop", token
        if len(output) == params.max_tokens or len(tokens) == max_len:
            return output, "length", None


class FakeDevice:
    """Runs steps in the order of launch, from nothing but what the step says."""

    def __init__(self, pages: PageAllocator, max_running: int, max_pages: int) -> None:
        self.size = pages.page_size
        self.memory = [0] * (pages.num_pages * self.size)
        self.page_table = np.zeros((max_running + 1, max_pages), dtype=np.int32)
        self.last_token = [0] * (max_running + 1)
        self.weights = 0
        self.num_placeholders = 0

    def update_pages(self, step: ScheduledStep) -> None:
        for update in step.page_updates:
            assert 0 not in update.pages
            self.page_table[update.row, update.first : update.first + len(update.pages)] = update.pages

    def run(self, step: ScheduledStep) -> list[int]:
        self.update_pages(step)
        order = sorted(range(step.num_requests), key=lambda at: hash((at, step.index)))
        sampled = [POISON] * step.num_requests
        for at in order:
            begin = int(step.query_starts[at])
            for offset in range(begin, begin + int(step.num_new_tokens[at])):
                self.write(step, offset)
            row, context = int(step.rows[at]), int(step.seq_lens[at])
            if step.samples[at]:
                values = [self.memory[self.slot(row, position)] for position in range(context)]
                sampled[at] = self.last_token[row] = next_token(values, self.weights)
        assert not any(self.memory[: self.size]), "page 0 was written"
        assert not self.page_table[0].any(), "row 0 was written"
        return sampled

    def write(self, step: ScheduledStep, offset: int) -> None:
        row, position = int(step.token_rows[offset]), int(step.positions[offset])
        token = int(step.input_ids[offset])
        if token == PLACEHOLDER:
            token = self.last_token[row]
            self.num_placeholders += 1
        before = self.memory[self.slot(row, position - 1)] if position else 0
        self.memory[self.slot(row, position)] = slot_value(before, token, position, self.weights)

    def slot(self, row: int, position: int) -> int:
        page = int(self.page_table[row, position // self.size])
        assert row, "a token in row 0"
        assert page, "a token on page 0"
        return page * self.size + position % self.size


class PoisoningAllocator(PageAllocator):
    """Pages that are handed out hold garbage, so that nobody lives on what an earlier owner left."""

    device: FakeDevice | None = None

    def allocate(self, count: int) -> list[int]:
        taken = super().allocate(count)
        for page in taken if self.device else ():
            assert self.device is not None
            self.device.memory[page * self.page_size : (page + 1) * self.page_size] = [
                POISON
            ] * self.page_size
        return taken


class Engine:
    """A scheduler and a fake device, launched and completed by the test."""

    def __init__(
        self,
        *,
        num_pages: int = 40,
        page_size: int = 4,
        prompt_bound: PromptBound | None = None,
        **config: Any,
    ) -> None:
        settings_ = {"max_running": 4, "max_batched_tokens": 16, "max_model_len": 64} | config
        self.config = SchedulerConfig(**settings_)
        self.pages = PoisoningAllocator(num_pages, page_size)
        self.scheduler = Scheduler(self.config, self.pages, prompt_bound=prompt_bound)
        self.device = FakeDevice(
            self.pages, self.config.max_running, self.pages.pages_for(self.scheduler.max_len)
        )
        self.pages.device = self.device
        self.launched: deque[tuple[ScheduledStep, list[int]]] = deque()
        self.requests: list[Request] = []
        self._decoding: set[Request] = set()

    def add(self, prompt: list[int], params: SamplingParams | None = None, **kwargs: Any) -> Request:
        params = params or SamplingParams(max_tokens=8, ignore_eos=True)
        request = Request(f"r{len(self.requests)}", tuple(prompt), params, EOS, **kwargs)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def embed(self, prompt: list[int], **kwargs: Any) -> Request:
        request = Request(f"r{len(self.requests)}", tuple(prompt), **kwargs)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def launch(self) -> ScheduledStep | None:
        oldest = next(iter([*self.scheduler.running, *self.scheduler.waiting]), None)
        waits_for_result = oldest is not None and self.waits_for_result(oldest)
        ready = {request: request.num_preemptions for request in self.ready_decodes()}
        step = self.scheduler.schedule()
        left = [request for request, before in ready.items() if request.num_preemptions == before]
        if step is None:
            assert self.scheduler.is_paused or oldest is None or waits_for_result
            assert self.scheduler.is_paused or not left
            return None
        self.check_that_all_decode(step, left)
        assert step.total_tokens <= self.config.max_batched_tokens
        assert step.num_requests <= self.config.max_running
        contexts = step.starts[: step.num_requests - len(step.prompt_tokens)].tolist()
        assert contexts == sorted(contexts, reverse=True), "the longest contexts come first"
        has_advanced = oldest in step.requests or waits_for_result
        assert has_advanced, "the oldest request did not advance"
        self.launched.append((step, self.device.run(step)))
        self.scheduler.check_integrity()
        return step

    def ready_decodes(self) -> list[Request]:
        running = self.scheduler.running
        return [it for it in running if it in self._decoding and not self.waits_for_result(it)]

    def check_that_all_decode(self, step: ScheduledStep, ready: list[Request]) -> None:
        """Whoever is ready is in every step."""
        assert all(request in step.requests for request in ready), "a decode sits out"
        self._decoding.difference_update(step.joined)
        self._decoding.update(request for at, request in enumerate(step.requests) if step.samples[at])

    def waits_for_result(self, request: Request) -> bool:
        if request.params is None:
            return request.num_unscheduled == 0
        end = min(self.scheduler.max_len, request.num_prompt_tokens + (request.params.max_tokens or 10**9))
        return request.num_tokens + request.num_pending >= end

    def complete(self) -> CompletedStep:
        done = self.scheduler.complete(*self.launched.popleft())
        self.scheduler.check_integrity()
        return done

    def fail(self, how_far: str) -> tuple[Request, ...]:
        """Launch a step that fails, when so much of it is done on the device; those that end with it."""
        step = self.scheduler.schedule()
        if step is None:
            return ()
        if how_far == "told of pages":
            self.device.update_pages(step)
        elif how_far == "computed":
            self.device.run(step)
        while self.launched:
            self.complete()
        failed = self.scheduler.fail(step, "out of memory")
        self.scheduler.check_integrity()
        return failed

    def turn(self) -> None:
        """Launch if possible, and stay as far ahead of the device as allowed."""
        step = self.launch() if len(self.launched) <= self.config.lookahead else None
        if self.launched and (step is None or len(self.launched) > self.config.lookahead):
            self.complete()

    def drain(self) -> None:
        # A request that is alone takes a step per token at most; preempted work is repeated.
        bound = 20 + sum(4 * self.scheduler.max_len for _ in self.requests)
        for _ in range(bound):
            if not self.scheduler.has_work:
                break
            self.turn()
        assert not self.scheduler.has_work, "requests starve"
        assert self.pages.num_free == self.pages.num_usable, "pages were lost"

    def check(self, request: Request) -> None:
        output, reason, stop = run_alone(request, self.scheduler.max_len, self.device.weights)
        assert request.output_ids == output
        assert request.finish_reason == reason
        assert request.stop_reason == stop


GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_pages", [12, 40])
def test_outputs_equal_those_of_requests_run_alone(
    lookahead: int, prefix_caching: bool, num_pages: int
) -> None:
    engine = Engine(num_pages=num_pages, lookahead=lookahead, prefix_caching=prefix_caching, max_model_len=40)
    shared = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for at in range(10):
        engine.add([*shared[: 1 + at % 9], at % VOCAB], SamplingParams(max_tokens=25, min_tokens=at))
    engine.drain()
    for request in engine.requests:
        engine.check(request)
    assert (engine.scheduler.num_preemptions > 0) == (num_pages == 12)
    assert (engine.pages.statistics.hit_tokens > 0) == prefix_caching
    assert engine.device.num_placeholders > 0


def test_a_prompt_longer_than_a_step_runs_in_chunks() -> None:
    engine = Engine(max_batched_tokens=8, lookahead=0)
    request = engine.add(list(range(12)) * 2)
    sizes, sampled = [], []
    for _ in range(4):
        step = engine.launch()
        assert step is not None
        sizes.append(int(step.num_new_tokens[0]))
        sampled.append(bool(step.samples[0]))
        engine.complete()
    assert sizes == [8, 8, 8, 1]
    assert sampled == [False, False, True, True]
    engine.drain()
    engine.check(request)


def test_without_chunked_prefill_a_prompt_runs_in_one_step() -> None:
    engine = Engine(max_batched_tokens=30, max_model_len=30, chunked_prefill=False, lookahead=0)
    first, second = engine.add([1] * 20), engine.add([2] * 20)
    step = engine.launch()
    assert step is not None
    assert step.items == [(first, 20)]
    engine.complete()
    step = engine.launch()
    assert step is not None
    assert step.items == [(first, 1), (second, 20)]
    engine.complete()
    engine.drain()


def test_drafts_go_on_while_a_prompt_has_no_room_beside_those_that_decode() -> None:
    config = SchedulerConfig(
        max_running=3,
        max_batched_tokens=16,
        max_model_len=16,
        chunked_prefill=False,
        lookahead=0,
        max_drafts=2,
    )
    scheduler = Scheduler(config, PageAllocator(40, 4), choose_drafts=lambda rows: 2)
    scheduler.add(Request("a", (1,), GREEDY))
    scheduler.add(Request("b", (2, 3), GREEDY))
    first = scheduler.schedule()
    assert first is not None
    scheduler.complete(first, [5, 5])
    scheduler.add(Request("long", (1,) * 15, GREEDY))
    step = scheduler.schedule()
    assert step is not None
    assert (step.num_requests, step.num_drafts) == (2, 2)
    scheduler.complete(step, np.full((3, 2), 5), [1, 3])
    scheduler.check_integrity()


def test_decodes_come_first_and_share_the_step_with_prefill() -> None:
    engine = Engine(max_batched_tokens=8)
    first = engine.add([1, 2, 3])
    engine.launch()
    second = engine.add([3] * 20)
    step = engine.launch()
    assert step is not None
    assert step.items == [(first, 1), (second, 7)]
    assert not step.is_uniform_decode
    assert step.samples.tolist() == [True, False]
    assert step.query_starts.tolist() == [0, 1]
    assert step.seq_lens.tolist() == [4, 7]
    assert step.positions.tolist() == [3, 0, 1, 2, 3, 4, 5, 6]
    assert step.token_rows.tolist() == [first.row] + [second.row] * 7
    assert step.input_ids.tolist() == [PLACEHOLDER] + [3] * 7


def test_a_steady_step_needs_nothing_and_reuses_the_batch() -> None:
    engine = Engine(page_size=16, max_running=3)
    for at in range(3):
        engine.add([at, 1, 2], SamplingParams(max_tokens=12, ignore_eos=True))
    engine.launch()
    second = engine.launch()
    assert second is not None
    for _ in range(8):
        engine.complete()
        step = engine.launch()
        assert step is not None
        assert step.is_steady
        assert step.requests is second.requests
    engine.complete()
    engine.drain()


def test_max_running_is_kept_and_rows_come_back() -> None:
    engine = Engine(max_running=2)
    requests = [engine.add([at, at]) for at in range(5)]
    engine.launch()
    assert [request.row for request in requests] == [1, 2, 0, 0, 0]
    assert [request.status for request in requests[1:3]] == [RequestStatus.RUNNING, RequestStatus.WAITING]
    engine.drain()
    assert engine.scheduler.rows.num_free == 2


def test_max_batched_tokens_is_kept() -> None:
    engine = Engine(max_batched_tokens=10)
    for _ in range(3):
        engine.add([1] * 7)
    step = engine.launch()
    assert step is not None
    assert [count for _, count in step.items] == [7, 3]


def test_max_tokens_ends_with_length() -> None:
    engine = Engine()
    request = engine.add([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    engine.drain()
    assert request.num_output_tokens == 3
    assert request.finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_max_model_len_ends_with_length(max_tokens: int | None) -> None:
    engine = Engine(max_model_len=10)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    engine.drain()
    assert request.num_tokens == 10
    assert request.finish_reason == FinishReason.LENGTH


def test_the_kv_cache_ends_with_length() -> None:
    engine = Engine(num_pages=4, page_size=4, max_model_len=64)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=None, ignore_eos=True))
    engine.drain()
    assert engine.scheduler.max_len == request.num_tokens == 12
    engine.check(request)


def first_token(prompt: list[int]) -> int:
    return run_alone(Request("x", tuple(prompt), SamplingParams(max_tokens=1)), 100)[0][0]


def prompt_with_first_token(is_eos: bool) -> list[int]:
    return next([3, at] for at in range(200) if (first_token([3, at]) in EOS) == is_eos)


def test_eos_ends_with_stop_unless_ignored() -> None:
    engine = Engine()
    prompt = prompt_with_first_token(is_eos=True)
    stopped = engine.add(prompt, SamplingParams(max_tokens=5))
    ignoring = engine.add(prompt, SamplingParams(max_tokens=5, ignore_eos=True))
    patient = engine.add(prompt, SamplingParams(max_tokens=5, min_tokens=1))
    engine.drain()
    assert (stopped.output_ids, stopped.finish_reason, stopped.stop_reason) == ([0], "stop", None)
    assert ignoring.num_output_tokens == 5
    assert patient.num_output_tokens > 1


def test_a_stop_token_is_the_stop_reason_and_not_ignored_with_eos() -> None:
    engine = Engine()
    prompt = prompt_with_first_token(is_eos=False)
    token = first_token(prompt)
    request = engine.add(prompt, SamplingParams(max_tokens=5, stop_token_ids=[99, token], ignore_eos=True))
    other = engine.add(prompt, SamplingParams(max_tokens=1, stop_token_ids=[token]))
    eos_too = prompt_with_first_token(is_eos=True)
    named_eos = engine.add(eos_too, SamplingParams(max_tokens=5, stop_token_ids=[0], ignore_eos=True))
    engine.drain()
    assert (request.output_ids, request.finish_reason, request.stop_reason) == ([token], "stop", token)
    assert other.finish_reason == "stop"
    assert (named_eos.finish_reason, named_eos.stop_reason) == ("stop", 0)


def test_a_request_found_finished_one_step_late_drops_that_token() -> None:
    engine = Engine()
    request = engine.add(prompt_with_first_token(is_eos=True), SamplingParams(max_tokens=5))
    other = engine.add([5, 5, 5])
    engine.launch()
    ahead = engine.launch()
    assert ahead is not None
    assert request in ahead.requests
    assert engine.complete().finished == (request,)
    newcomer = engine.add([7] * 6)
    step = engine.launch()
    assert step is not None
    assert newcomer.row in ahead.rows, "the row is handed out again at once"
    done = engine.complete()
    assert done.step is ahead
    assert [who for who, _ in done.new_tokens()] == [other]
    assert request.output_ids == [0]
    engine.drain()
    engine.check(newcomer)
    engine.check(other)


def test_the_last_token_is_not_scheduled_twice() -> None:
    engine = Engine(lookahead=2)
    engine.add([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))
    assert engine.launch() is not None
    assert engine.launch() is not None
    assert engine.launch() is None
    engine.drain()


def test_in_flight_and_pending_are_counted() -> None:
    engine = Engine(max_batched_tokens=4)
    request = engine.add([1] * 6)
    engine.launch()
    assert (request.num_computed, request.num_in_flight, request.num_pending) == (0, 4, 0)
    engine.launch()
    assert (request.num_computed, request.num_in_flight, request.num_pending) == (0, 6, 1)
    assert request.num_unscheduled == 1
    engine.complete()
    assert (request.num_computed, request.num_in_flight, request.num_tokens) == (4, 2, 6)
    engine.launch()
    engine.complete()
    assert (request.num_computed, request.num_in_flight, request.num_tokens) == (6, 1, 7)
    assert request.num_output_tokens == len(request.output_ids) == 1


def test_only_lookahead_steps_may_be_in_flight() -> None:
    engine = Engine(lookahead=1)
    engine.add([1, 2])
    engine.launch()
    engine.launch()
    with pytest.raises(AssertionError, match="complete a step"):
        engine.launch()


def test_steps_complete_in_order() -> None:
    engine = Engine()
    engine.add([1, 2])
    engine.launch()
    engine.launch()
    with pytest.raises(AssertionError, match="in the order"):
        engine.scheduler.complete(*engine.launched[1])


def test_preemption_takes_the_youngest_and_gives_the_same_tokens() -> None:
    engine = Engine(num_pages=16, prefix_caching=False, max_model_len=36)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [engine.add([at] * 6, params) for at in range(3)]
    engine.drain()
    assert [request.num_preemptions > 0 for request in requests] == [False, False, True]
    for request in requests:
        engine.check(request)


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    engine = Engine(num_pages=12, max_model_len=40)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    requests = [engine.add([at] * 6, params) for at in range(3)]
    engine.drain()
    assert requests[2].num_preemptions > 0
    assert engine.pages.statistics.hit_tokens > 0
    assert requests[2].num_cached_tokens == 0, "only what was cached at arrival counts"
    engine.check(requests[2])


def test_a_prompt_in_progress_waits_when_older_requests_took_the_pages() -> None:
    engine = Engine(num_pages=11, max_running=2, max_batched_tokens=2, lookahead=0)
    old = engine.add([1] * 4, SamplingParams(max_tokens=30, ignore_eos=True))
    young = engine.add([2] * 24)
    waited = 0
    while engine.scheduler.has_work:
        step = engine.launch()
        assert step is not None
        waited += young.status is RequestStatus.RUNNING and young not in step.requests
        engine.complete()
    assert waited > 0
    engine.check(old)
    engine.check(young)


def test_requests_are_served_in_order_of_arrival() -> None:
    engine = Engine(max_running=2)
    requests = [engine.add([at], SamplingParams(max_tokens=4, ignore_eos=True)) for at in range(6)]
    finished: list[Request] = []
    while engine.scheduler.has_work:
        engine.launch()
        finished += engine.complete().finished
    assert finished == requests


def test_a_small_request_does_not_overtake_one_that_waits_for_pages() -> None:
    engine = Engine(num_pages=12)
    engine.add([1] * 20)
    engine.launch()
    large, small = engine.add([2] * 30), engine.add([3])
    engine.launch()
    assert (large.status, small.status) == (RequestStatus.WAITING, RequestStatus.WAITING)
    engine.drain()
    engine.check(large)


def test_a_prefix_is_shared_while_its_first_owner_runs() -> None:
    engine = Engine(lookahead=0)
    prompt = list(range(9))
    first = engine.add(prompt)
    engine.launch()
    engine.complete()
    second = engine.add(prompt)
    step = engine.launch()
    assert step is not None
    assert step.items == [(first, 1), (second, 1)]
    assert second.num_cached_tokens == 8
    assert second.pages[:2] == first.pages[:2]
    engine.complete()
    engine.drain()
    engine.check(second)


def test_equal_prompts_in_one_step_end_up_on_the_same_pages() -> None:
    engine = Engine(max_batched_tokens=32)
    first, second = engine.add(list(range(9))), engine.add(list(range(9)))
    engine.launch()
    engine.launch()
    assert set(first.pages).isdisjoint(second.pages)
    engine.complete()
    assert first.pages[:2] == second.pages[:2]
    step = engine.launch()
    assert step is not None
    assert not step.is_steady
    engine.drain()
    engine.check(first)
    engine.check(second)


def test_prompt_logprobs_and_embeddings_compute_every_token() -> None:
    engine = Engine(lookahead=0)
    prompt = list(range(9))
    engine.add(prompt)
    engine.drain()
    engine.add(prompt, SamplingParams(max_tokens=2, prompt_logprobs=0))
    step = engine.launch()
    assert step is not None
    assert step.total_tokens == 9
    engine.complete()
    embedding = engine.embed(prompt)
    step = engine.launch()
    assert step is not None
    assert step.items[-1] == (embedding, 9)
    assert not step.samples[-1]
    assert embedding in engine.complete().finished
    assert (embedding.finish_reason, embedding.output_ids) == ("stop", [])
    engine.drain()


def test_abort_while_waiting_running_and_in_flight() -> None:
    engine = Engine(max_running=2)
    running, other, waiting = (engine.add([at] * 5) for at in range(3))
    engine.launch()
    engine.launch()
    assert engine.scheduler.abort(waiting.request_id)
    assert engine.scheduler.abort(running.request_id)
    engine.scheduler.check_integrity()
    assert not engine.scheduler.abort(running.request_id), "aborting twice is harmless"
    assert not engine.scheduler.abort("nobody")
    assert running.finish_reason == waiting.finish_reason == "abort"
    assert [who for who, _ in engine.complete().new_tokens()] == [other]
    engine.drain()
    engine.check(other)


class ComparedRequest(Request):
    """Counts how often it is looked at on the way to another."""

    looks = 0

    def __eq__(self, other: object) -> bool:
        ComparedRequest.looks += 1
        return self is other

    __hash__ = Request.__hash__


def test_who_leaves_the_queue_is_not_looked_for_among_all_that_wait() -> None:
    scheduler = Scheduler(SchedulerConfig(1, 100, 100), PageAllocator(40, 4))
    for number in range(50):
        scheduler.add(ComparedRequest(str(number), [1, 2], SamplingParams()))
    for number in range(49, 9, -1):
        assert scheduler.abort(str(number))
    assert [request.request_id for request in scheduler.waiting] == [str(number) for number in range(10)]
    assert ComparedRequest.looks == 0, "10,000 clients that leave would take seconds"


def test_abort_in_the_middle_of_a_prompt() -> None:
    engine = Engine(max_batched_tokens=4, lookahead=2)
    request = engine.add([1] * 20)
    engine.launch()
    engine.launch()
    assert engine.scheduler.abort(request.request_id)
    engine.scheduler.check_integrity()
    assert engine.launch() is None
    other = engine.add([2] * 20)
    engine.drain()
    engine.check(other)


def test_an_embedding_does_not_decode() -> None:
    engine = Engine()
    engine.embed([1, 2, 3])
    assert engine.launch() is not None
    assert engine.launch() is None
    engine.drain()


def test_nobody_is_admitted_to_be_preempted_at_once() -> None:
    engine = Engine(num_pages=8)
    engine.add([1] * 8)
    engine.launch()
    newcomer = engine.add([2] * 16)
    engine.launch()
    assert engine.pages.num_free == 4, "just enough for the newcomer, but the first still grows"
    assert newcomer.status is RequestStatus.WAITING
    engine.drain()
    assert newcomer.num_preemptions == 0
    engine.check(newcomer)


def test_the_caller_can_end_a_request_for_a_stop_string() -> None:
    engine = Engine()
    request = engine.add([1, 2])
    engine.launch()
    engine.launch()
    engine.complete()
    engine.scheduler.finish(request, FinishReason.STOP, stop_reason="\n")
    assert (request.finish_reason, request.stop_reason, request.num_output_tokens) == ("stop", "\n", 1)
    assert not engine.complete().accepted.any()
    assert not engine.scheduler.has_work


def test_pause_and_continue() -> None:
    engine = Engine()
    request = engine.add([1, 2, 3])
    engine.launch()
    engine.scheduler.pause()
    assert engine.launch() is None
    engine.complete()
    assert request.num_output_tokens == 1
    late = engine.add([4, 5])
    assert engine.launch() is None
    engine.scheduler.resume()
    engine.drain()
    engine.check(request)
    engine.check(late)


def test_a_failed_step_ends_its_requests_with_the_error_and_nobody_else() -> None:
    engine = Engine(max_running=2)
    failing, waiting = [engine.add([at] * 5) for at in range(2)], engine.add([9])
    step = engine.launch()
    assert step is not None
    engine.launched.clear()
    assert engine.scheduler.fail(step, "out of memory") == tuple(failing)
    assert [(request.finish_reason, request.error) for request in failing] == [("error", "out of memory")] * 2
    engine.drain()
    engine.check(waiting)


def test_after_new_weights_no_old_page_is_found() -> None:
    engine = Engine()
    prompt = list(range(9))
    old = engine.add(prompt, SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(8):
        engine.turn()
    engine.device.weights = 1
    engine.scheduler.flush_prefix_cache()
    new = engine.add(prompt)
    engine.drain()
    assert old.num_output_tokens == 30
    assert new.num_cached_tokens == 0
    engine.check(new)
    newest = engine.add([*prompt, *old.output_ids[:20]])
    engine.drain()
    assert newest.num_cached_tokens == 8, "what was computed after the flush, and nothing from before"
    engine.check(newest)


def test_more_stop_tokens_than_ever_before() -> None:
    engine = Engine()
    before = engine.add([1, 2], SamplingParams(max_tokens=6))
    request = engine.add([3, 4], SamplingParams(max_tokens=6, stop_token_ids=list(range(50))))
    engine.drain()
    engine.check(before)
    engine.check(request)


@pytest.mark.parametrize(
    ("config", "num_pages", "prompt_len", "says"),
    [
        ({"max_model_len": 10}, 40, 10, "a prompt of 10 tokens and at least one more cannot fit, the model"),
        ({"max_model_len": 10}, 40, 100, "the model length is 10: raise max_model_len"),
        ({"max_model_len": 64}, 5, 16, "the KV cache holds 16 tokens in all: give it more memory"),
    ],
)
def test_a_prompt_that_can_never_fit_is_refused(
    config: dict[str, int], num_pages: int, prompt_len: int, says: str
) -> None:
    engine = Engine(num_pages=num_pages, **config)
    with pytest.raises(RequestError) as caught:
        engine.add([1] * prompt_len)
    assert says in str(caught.value)
    assert not engine.scheduler.has_work
    fits = engine.add([1] * min(9, prompt_len))
    engine.drain()
    engine.check(fits)


def test_an_embedding_may_fill_the_model_length() -> None:
    engine = Engine(max_model_len=10, max_batched_tokens=4)
    engine.embed([1] * 10)
    with pytest.raises(RequestError, match="a prompt of 11 tokens cannot fit"):
        engine.embed([1] * 11)
    engine.drain()
    assert engine.requests[0].finish_reason == "stop"


def test_bad_requests_are_refused() -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        Request("r", ())
    with pytest.raises(RequestError, match="token id -3 is negative"):
        Request("r", (1, -3))
    engine = Engine()
    engine.add([1])
    with pytest.raises(RequestError, match="r0 is already being served"):
        engine.scheduler.add(Request("r0", (1,), GREEDY))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"max_running": 0}, "max_running must be at least 1"),
        ({"max_batched_tokens": 0}, "max_batched_tokens must be at least 1"),
        ({"max_model_len": 0}, "max_model_len must be at least 1"),
        ({"lookahead": -1}, "lookahead must be at least 0"),
        ({"max_running": 20}, "is below max_running"),
        ({"chunked_prefill": False}, "without chunked prefill"),
    ],
)
def test_contradictory_limits_are_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Engine(**config)


def test_an_idle_scheduler_has_nothing_to_run() -> None:
    engine = Engine()
    assert engine.launch() is None
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("seed", range(3))
def test_a_soak_of_everything_at_once(seed: int) -> None:
    random = np.random.default_rng(seed)
    engine = Engine(num_pages=24, max_running=6, max_batched_tokens=12, max_model_len=48)
    dropped = 0
    for _ in range(1500):
        kind = random.integers(20)
        if kind < 4 and len(engine.requests) < 150:
            prompt = [*range(1, 1 + random.integers(1, 20)), int(random.integers(2))]
            max_tokens, ignore_eos = int(random.integers(1, 40)), bool(random.integers(2))
            engine.add(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos))
        elif kind == 4 and engine.scheduler.has_work and random.integers(3) == 0:
            engine.scheduler.abort(engine.requests[random.integers(len(engine.requests))].request_id)
        elif len(engine.launched) <= engine.config.lookahead and random.integers(2):
            engine.launch()
        elif engine.launched:
            done = engine.complete()
            dropped += int((done.step.samples & ~done.accepted).sum())
    engine.drain()
    statistics = engine.pages.statistics
    assert len(engine.requests) == 150
    for request in engine.requests:
        if request.finish_reason != "abort":
            engine.check(request)
    assert min(statistics.hit_tokens, statistics.evictions, statistics.twins) > 0
    assert engine.scheduler.num_preemptions > 0
    assert dropped > 0
    assert {request.finish_reason for request in engine.requests} == {"abort", "stop", "length"}


Arrival = tuple[list[int], SamplingParams | None, Any, str]
WEIGHTS = {"": 1.0, "heavy": 2.5, "light": 0.4}


def an_arrival(
    shared: int, own: list[int], max_tokens: int, min_tokens: int, ignore_eos: bool, kind: int, tenant: str
) -> Arrival:
    prompt = [*range(1, 1 + shared), *own]
    if kind == 0:
        return prompt, None, None, tenant
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        ignore_eos=ignore_eos,
        stop_token_ids=[7] if max_tokens % 2 else [],
        prompt_logprobs=0 if kind == 1 else None,
    )
    return prompt, params, GRAMMAR if kind == 2 else None, tenant


ARRIVAL = st.builds(
    an_arrival,
    shared=st.integers(0, 20),
    own=st.lists(st.integers(0, 1), min_size=1, max_size=2),
    max_tokens=st.integers(1, 30),
    min_tokens=st.integers(0, 12),
    ignore_eos=st.booleans(),
    kind=st.integers(0, 9),
    tenant=st.sampled_from(["", "", *WEIGHTS]),
)


class Serving(RuleBasedStateMachine):
    """Arrivals, steps, late completions, aborts, pauses and new weights in any order, on scarce pages."""

    engine: Engine

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        max_len = data.draw(st.integers(12, 40), label="max_model_len")
        running = data.draw(st.integers(1, 5), label="max_running")
        chunked = data.draw(st.booleans(), label="chunked_prefill")
        tokens = data.draw(st.integers(running, 12) if chunked else st.integers(max_len, 60), label="tokens")
        self.engine = Engine(
            num_pages=data.draw(st.integers(4, 16) | st.integers(17, 40), label="num_pages"),
            page_size=data.draw(st.sampled_from([4, 2, 1]), label="page_size"),
            max_running=running,
            max_batched_tokens=tokens,
            max_model_len=max_len,
            chunked_prefill=chunked,
            prefix_caching=data.draw(st.integers(0, 3), label="prefix_caching") > 0,
            lookahead=data.draw(st.integers(0, 2), label="lookahead"),
        )
        self.exempt: set[Request] = set()

    @rule(arrivals=st.lists(ARRIVAL, min_size=1, max_size=4), turns=st.integers(0, 3))
    def arrive(self, arrivals: list[Arrival], turns: int) -> None:
        longest = self.engine.scheduler.max_len
        for prompt, params, grammar, tenant in arrivals:
            whose: dict[str, Any] = {"tenant": tenant, "weight": WEIGHTS[tenant]}
            if params is None:
                self.engine.embed(prompt[:longest], **whose)
            else:
                self.engine.add(prompt[: longest - 1], params, grammar=grammar, **whose)
        self.turn(turns)

    @precondition(lambda self: len(self.engine.launched) <= self.engine.config.lookahead)
    @rule()
    def launch(self) -> None:
        self.engine.launch()

    @precondition(lambda self: self.engine.launched)
    @rule()
    def complete(self) -> None:
        self.engine.complete()

    @rule(turns=st.integers(2, 15))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.engine.turn()

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(which=st.integers(0, 9), turns=st.integers(0, 3))
    def abort(self, which: int, turns: int) -> None:
        self.turn(turns)
        scheduler = self.engine.scheduler
        unfinished = [*scheduler.running[::-1], *scheduler.waiting][which : which + 1]
        for request in unfinished:
            so_far = request.output_ids
            assert scheduler.abort(request.request_id)
            assert request.output_ids == so_far
            self.exempt.add(request)

    @precondition(lambda self: len(self.engine.launched) <= self.engine.config.lookahead)
    @rule(how_far=st.sampled_from(FAILURES), turns=st.integers(0, 3))
    def fail(self, how_far: str, turns: int) -> None:
        self.exempt.update(self.engine.fail(how_far))
        self.turn(turns)

    @rule(turns=st.integers(1, 3), arrival=ARRIVAL)
    def pause_and_continue(self, turns: int, arrival: Arrival) -> None:
        self.engine.scheduler.pause()
        self.turn(turns)
        self.arrive([arrival], turns)
        self.engine.scheduler.resume()

    @precondition(lambda self: len(self.engine.requests) > 5)
    @rule()
    def change_weights(self) -> None:
        # Outputs already complete are compared now; those begun under the old weights are a mixture.
        self.compare()
        self.exempt.update(self.engine.requests)
        self.engine.device.weights += 1
        self.engine.scheduler.flush_prefix_cache()

    @invariant()
    def books_agree(self) -> None:
        self.engine.scheduler.check_integrity()

    def compare(self) -> None:
        for request in self.engine.requests:
            if request not in self.exempt and request.is_finished:
                self.engine.check(request)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.drain()
        self.compare()
        assert all(request.finish_reason is not None for request in self.engine.requests)


TestServing = Serving.TestCase
# Without shrinking, which takes minutes here: a red run must name its error before the test times out.
# To shrink a failure, add Phase.shrink and raise the timeout.
TestServing.settings = settings(
    max_examples=50,
    stateful_step_count=25,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestServingForLonger(Serving.TestCase):
    settings = settings(TestServing.settings, max_examples=2500)
