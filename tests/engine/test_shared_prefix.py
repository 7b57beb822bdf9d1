"""What the requests of a decode batch share: found when the batch or a page changes, and never too much."""

import random
from unittest.mock import patch

import pytest

from engine.test_decode_batch import do_something
from engine.test_scheduler import Engine
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.engine.scheduling.request import Request
from ostinato.engine.scheduling.request_pages import RequestPages
from ostinato.engine.scheduling.scheduled_step import ScheduledStep
from ostinato.engine.stepping.shared_prefix import pays

LONG = SamplingParams(max_tokens=30, ignore_eos=True)


def common_pages(requests: tuple[Request, ...]) -> int:
    """Counted one by one."""
    count = 0
    for column in zip(*(request.pages for request in requests), strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count


def assert_right(step: ScheduledStep, engine: Engine) -> None:
    shared = step.shared_prefix
    if not step.is_uniform_decode:
        assert shared == 0
        return
    assert shared % engine.pages.page_size == 0
    assert shared <= step.starts.min(), "the new token of each stands behind it"
    if len(step.requests) > 1:
        common = common_pages(step.requests) * engine.pages.page_size
        assert shared <= common
        is_whole = len(step.requests) == len(engine.scheduler._running.decoding)
        assert shared == common or not is_whole


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(12))
def test_it_is_what_their_pages_have_in_common_in_every_step(seed: int, ahead: int) -> None:
    chance = random.Random(seed)
    engine = Engine(
        max_running=chance.choice([2, 3, 6]),
        num_pages=chance.choice([20, 60, 400]),
        page_size=chance.choice([1, 2, 4]),
        lookahead=ahead,
        shared_prefixes=True,
    )
    found = 0
    for _ in range(150):
        if chance.random() < 0.1:
            own = [chance.randrange(1, 5) for _ in range(chance.randint(1, 4))]
            engine.add([1, 2, 3, 4, 1, 2, 3, 4, *own], SamplingParams(max_tokens=20))
        do_something(engine, chance)
        step = engine.launch()
        if step is not None:
            assert_right(step, engine)
            found += step.shared_prefix > 0
        if engine.launched and (step is None or len(engine.launched) > ahead):
            engine.complete()
    engine.scheduler.resume()
    engine.drain()
    assert found or seed, "the draw of seed 0 has shared prefixes"


def decode_steps(engine: Engine, count: int) -> list[ScheduledStep]:
    """The next steps, each complete before the next."""
    steps = []
    for _ in range(count):
        step = engine.launch()
        assert step is not None
        engine.complete()
        steps.append(step)
    return steps


def test_requests_that_arrive_together_share_once_their_pages_are_found_equal() -> None:
    engine = Engine(shared_prefixes=True, lookahead=0)
    for own in (5, 6, 7):
        engine.add([1, 2, 3, 4, own], LONG)
    first, *later = decode_steps(engine, 3)
    assert not first.is_uniform_decode
    assert [step.shared_prefix for step in later] == [4, 4]


def test_who_shares_nothing_ends_it_for_all_until_he_leaves() -> None:
    engine = Engine(shared_prefixes=True, lookahead=0)
    for own in (5, 6):
        engine.add([1, 2, 3, 4, own], LONG)
    decode_steps(engine, 2)
    assert decode_steps(engine, 1)[0].shared_prefix == 4
    stranger = engine.add([9, 9, 9, 9, 9], LONG)
    assert [step.shared_prefix for step in decode_steps(engine, 3)] == [0, 0, 0]
    engine.scheduler.abort(stranger.request_id)
    assert decode_steps(engine, 1)[0].shared_prefix == 4


@pytest.mark.parametrize("options", [{"prefix_caching": False}, {"shared_prefixes": False}])
def test_without_the_cache_or_the_option_nothing_is_shared(options: dict[str, bool]) -> None:
    engine = Engine(**{"shared_prefixes": True, "lookahead": 0, **options})
    for own in (5, 6):
        engine.add([1, 2, 3, 4, own], LONG)
    assert [step.shared_prefix for step in decode_steps(engine, 4)] == [0] * 4


def test_a_single_request_shares_nothing() -> None:
    engine = Engine(shared_prefixes=True, lookahead=0)
    engine.add([1, 2, 3, 4, 5], LONG)
    assert [step.shared_prefix for step in decode_steps(engine, 3)] == [0] * 3


def test_nobody_looks_while_nothing_changes() -> None:
    engine = Engine(shared_prefixes=True, lookahead=0, page_size=16)
    for own in (5, 6, 7):
        engine.add([*[1] * 9, own], SamplingParams(max_tokens=40, ignore_eos=True))
    decode_steps(engine, 4)
    with patch.object(RequestPages, "shared_prefix", side_effect=AssertionError):
        decode_steps(engine, 20)


def test_a_cascade_pays_by_what_it_does_not_read() -> None:
    four_kilobytes = 2 * 8 * 128 * 2
    assert pays(32, 544, four_kilobytes)
    assert not pays(32, 528, four_kilobytes)
    assert pays(8, 2352, four_kilobytes)
    assert not pays(3, 100_000, four_kilobytes), "no graph is captured for so few"
    assert not pays(256, 0, four_kilobytes)
