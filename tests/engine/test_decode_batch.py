"""Steady steps are what scheduling would come to, and end where something changes."""

import itertools
import random
from unittest.mock import patch

import numpy as np
import pytest

from engine.test_scheduler import Engine
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.engine.scheduling.decode_batch import DecodeBatch
from ostinato.engine.scheduling.landing import Landing
from ostinato.engine.scheduling.request import FinishReason, IntArray, RequestRows
from ostinato.engine.scheduling.scheduled_step import ScheduledStep


def steps_of(seed: int, *, ahead: int) -> list[tuple[object, ...]]:
    """What a scheduler does with arrivals, ends, aborts and few pages, drawn from a seed."""
    chance = random.Random(seed)
    engine = Engine(
        max_running=chance.choice([1, 3, 6]),
        num_pages=chance.choice([20, 60, 400]),
        page_size=chance.choice([2, 4, 16]),
        lookahead=ahead,
    )
    found: list[tuple[object, ...]] = []
    for _ in range(120):
        do_something(engine, chance)
        step = engine.launch()
        if step is not None:
            pages = [(update.row, update.first, update.pages.tolist()) for update in step.page_updates]
            names = [request.request_id for request in step.requests]
            arrays = (step.rows, step.starts, step.num_new_tokens, step.samples, step.tenancies)
            found.append((step.index, names, pages, *(array.tolist() for array in arrays)))
        if engine.launched and (step is None or len(engine.launched) > ahead):
            engine.complete()
    engine.scheduler.resume()
    engine.drain()
    found += [(it.request_id, it.output_ids, str(it.finish_reason)) for it in engine.requests]
    return found


def do_something(engine: Engine, chance: random.Random) -> None:
    """What callers do between steps, or mostly nothing."""
    scheduler = engine.scheduler
    prompt = [chance.randrange(1, 5) for _ in range(chance.randint(1, 16))]
    what = chance.random()
    if what < 0.10:
        stops = chance.choice([None, [3], [2, 3]])
        engine.add(prompt, SamplingParams(max_tokens=chance.choice([1, 5, 40]), stop_token_ids=stops))
    elif what < 0.13:
        engine.add(prompt, SamplingParams(max_tokens=chance.randint(1, 20)), grammar=object())
    elif what < 0.15:
        engine.embed(prompt)
    elif what < 0.18 and engine.requests:
        scheduler.abort(chance.choice(engine.requests).request_id)
    elif what < 0.21 and scheduler.running:
        scheduler.finish(chance.choice(scheduler.running), FinishReason.STOP, stop_reason="x")
    elif what < 0.23:
        scheduler.flush_prefix_cache()
    elif what < 0.26:
        (scheduler.resume if scheduler.is_paused else scheduler.pause)()


LAND = Landing._land


def checked_land(self: Landing, step: ScheduledStep, rows: IntArray) -> IntArray:
    """What is known without looking is what tenancies say."""
    wanted = self._rows.tenancy[rows] == step.tenancies
    found = LAND(self, step, rows)
    assert found.tolist() == wanted.tolist()
    return found


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 12), marks=pytest.mark.slow)], ids=str)
def test_a_steady_step_is_the_one_that_would_be_scheduled(seeds: range, ahead: int) -> None:
    advance, steady = DecodeBatch.advance, 0

    def counted(batch: DecodeBatch) -> object:
        nonlocal steady
        steady += 1
        return advance(batch)

    for seed in seeds:
        with patch.object(DecodeBatch, "advance", counted), patch.object(Landing, "_land", checked_land):
            found = steps_of(seed, ahead=ahead)
        with patch.object(DecodeBatch, "look_ahead", lambda batch, num_drafts: None):
            assert found == steps_of(seed, ahead=ahead)
    assert steady > 50, "hardly a step was steady"


def test_a_stretch_ends_with_a_page_and_with_the_last_token() -> None:
    engine = Engine(page_size=4, num_pages=9, max_running=2, lookahead=0)
    engine.add([1, 2, 3], SamplingParams(max_tokens=7, ignore_eos=True))
    taken = []
    while engine.scheduler.has_work:
        step = engine.launch()
        assert step is not None
        batch = engine.scheduler._running.batch
        taken.append((bool(step.page_updates), 0 if batch is None else batch.steady_steps))
        engine.complete()
    # The prompt; position 3; then a page every four tokens, the last of them for a token that ends it.
    assert taken == [(True, 0), (False, 0), (True, 3), (False, 2), (False, 1), (False, 0), (True, 0)]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(12))
def test_a_step_of_one_request_ends_as_one_of_several_does(seed: int, ahead: int) -> None:
    with patch.object(Landing, "_complete_one", autospec=True, side_effect=Landing._complete_one) as one:
        found = steps_of(seed, ahead=ahead)
        assert one.called
    with patch.object(Landing, "_complete_one", Landing._complete_all):
        assert steps_of(seed, ahead=ahead) == found


def test_a_token_alone_ends_what_it_ends_among_others() -> None:
    """By every length, at every stop token and at none, early or late."""
    cases = list(itertools.product((4, 5, 6), (0, 5, 6), (-1, 3, 7), (3, 7, 8)))
    for length, (most, stops_from, stop, token) in itertools.product((4, 5), cases):
        found = []
        for is_alone in (True, False):
            rows = RequestRows(2, 16, 16)
            rows.stop_ids = np.array([[-1, 1, -1], [-1, stop, -1]], dtype=np.int32)
            rows.max_tokens[1], rows.stops_from[1] = most, stops_from
            if is_alone:
                ends = rows.append_one(1, length, token)
            else:
                over, stopped = rows.append(np.array([1]), np.array([length]), np.array([token]))
                ends = over == [0], stopped == [0]
            found.append((ends, rows.num_tokens[1], rows.token_ids[1].tolist()))
        assert found[0] == found[1], (length, most, stops_from, stop, token)
