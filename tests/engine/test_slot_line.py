"""Requests with more adapters than slots: nobody waits forever, nobody waits for what he does not need."""

from ostinato.cache.pages import PageAllocator
from ostinato.engine.adapters.slots import AdapterSlots, AdapterVersion
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.engine.scheduling.request import Request
from ostinato.engine.scheduling.scheduler import Scheduler
from ostinato.engine.scheduling.scheduler_config import SchedulerConfig

MOST = 4


class Line:
    """A scheduler whose steps complete at once."""

    def __init__(self, num_slots: int) -> None:
        self.slots = AdapterSlots(num_slots)
        config = SchedulerConfig(max_running=MOST, max_batched_tokens=64, max_model_len=64, lookahead=0)
        self.scheduler = Scheduler(config, PageAllocator(64), self.slots)
        self.versions: dict[str, AdapterVersion] = {}
        self.count = 0

    def version(self, name: str) -> AdapterVersion:
        return self.versions.setdefault(name, AdapterVersion(name, len(self.versions) + 1, None))

    def add(self, adapter: str | None, tokens: int = 3) -> Request:
        self.count += 1
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        version = None if adapter is None else self.version(adapter)
        request = Request(str(self.count), [1, 2, self.count], params, adapter=version)  # type: ignore[arg-type]
        self.scheduler.add(request)
        return request

    def step(self) -> list[Request]:
        step = self.scheduler.schedule()
        if step is None:
            return []
        adapters = {request.adapter for request in step.requests} - {None}
        assert step.num_adapters == len(adapters) <= len(self.slots.tenants)
        for request in step.requests:
            if request.adapter is not None:
                assert self.slots.tenants[request.adapter_slot] is request.adapter
            else:
                assert request.adapter_slot == -1
        self.scheduler.complete(step, [5] * step.num_requests)
        self.scheduler.check_integrity()
        return list(step.requests)


def test_whoever_needs_no_slot_passes_whoever_waits_for_one() -> None:
    line = Line(1)
    line.add("a", tokens=30)
    waiting, base, same = line.add("b"), line.add(None), line.add("a")
    line.step()
    assert base.row
    assert same.row
    assert not waiting.row
    assert line.scheduler.num_waiting == 1


def test_nobody_is_passed_forever() -> None:
    line = Line(1)
    line.add("a")
    waiting = line.add("b")
    passed = 0
    for _ in range(200):
        line.add("a")
        ran = line.step()
        passed += sum(request.adapter is line.version("a") for request in ran)
        if waiting in ran:
            break
    assert waiting.row or waiting.is_finished
    assert passed < 60
    while line.scheduler.has_work:  # those with "a" go on behind it
        line.step()
    assert all(version.num_users == 0 for version in line.versions.values())


def test_three_adapters_take_turns_over_two_slots_in_the_order_of_arrival() -> None:
    line = Line(2)
    requests = [line.add(name) for name in ("a", "b", "c", "d", "e")]
    begun: list[Request] = []
    while line.scheduler.has_work:
        begun += [request for request in line.step() if request not in begun]
    assert begun == requests


def test_one_that_waits_may_be_aborted_and_preempted_ones_come_back() -> None:
    line = Line(1)
    first, waiting = line.add("a", tokens=20), line.add("b")
    line.step()
    assert line.scheduler.abort(waiting.request_id)
    assert line.version("b").num_users == 0
    line.scheduler.flush_prefix_cache(computes_again=True)
    other = line.add("b")
    while line.scheduler.has_work:
        line.step()
    assert first.num_output_tokens == 20
    assert other.num_output_tokens == 3


def test_a_retired_version_gives_its_slot_back_with_its_last_request() -> None:
    line = Line(2)
    old = line.add("a", tokens=4)
    line.step()
    before = line.version("a")
    line.slots.retire(before)
    line.versions["a"] = AdapterVersion("a", 9, None)
    new = line.add("a", tokens=4)
    assert old.adapter is not new.adapter
    line.step()
    assert line.slots.tenants == [before, line.versions["a"]]
    while line.scheduler.has_work:
        line.step()
    assert line.slots.tenants == [None, line.versions["a"]]


def test_requests_of_a_replaced_adapter_run_though_all_slots_are_kept_for_pinned_ones() -> None:
    line = Line(2)
    old, new, other = line.version("old"), line.version("new"), line.version("other")
    waiting = line.add("old")
    line.slots.pin(new)
    line.slots.pin(other)
    line.slots.retire(old)
    beside = [line.add("new", tokens=9), line.add("other", tokens=9)]
    for _ in range(40):
        line.step()
    assert waiting.num_output_tokens == 3
    assert [request.num_output_tokens for request in beside] == [9, 9]
    assert {tenant and tenant.name for tenant in line.slots.tenants} == {"new", "other"}
    # And so it is if they are preempted while the pinned ones have their slots, with nothing to do.
    old = line.version("older")
    waiting = line.add("older", tokens=20)
    line.slots.retire(old)
    for _ in range(5):
        line.step()
    line.scheduler.flush_prefix_cache(computes_again=True)
    beside = [line.add("new"), line.add("other")]
    for _ in range(60):
        line.step()
    assert waiting.num_output_tokens == 20
    assert [request.num_output_tokens for request in beside] == [3, 3]
    assert {tenant and tenant.name for tenant in line.slots.tenants} == {"new", "other"}
