"""Steady steps are what scheduling would come to, and end where something changes."""

import random
from unittest.mock import patch

import pytest

from engine.test_scheduler import Engine
from ostinato.engine.decode_batch import DecodeBatch
from ostinato.engine.sampling_params import SamplingParams


def steps_of(seed: int, *, ahead: int) -> list[tuple[object, ...]]:
    """What a scheduler does with arrivals, ends, aborts and few pages, drawn from a seed."""
    chance = random.Random(seed)
    engine = Engine(
        max_running=chance.choice([1, 3, 6]),
        num_pages=chance.choice([20, 60, 400]),
        page_size=chance.choice([2, 4, 16]),
        lookahead=ahead,
        prompt_burst=chance.choice([0, 2]),
    )
    found: list[tuple[object, ...]] = []
    for _ in range(120):
        if chance.random() < 0.15:
            prompt = [chance.randrange(1, 5) for _ in range(chance.randint(1, 20))]
            engine.add(prompt, SamplingParams(max_tokens=chance.randint(1, 40)))
        if chance.random() < 0.02 and engine.requests:
            engine.scheduler.abort(chance.choice(engine.requests).request_id)
        step = engine.launch()
        if step is not None:
            pages = [(update.row, update.first, update.pages) for update in step.page_updates]
            names = [request.request_id for request in step.requests]
            arrays = (step.rows, step.starts, step.num_new_tokens, step.samples, step.tenancies)
            found.append((step.index, names, pages, *(array.tolist() for array in arrays)))
        if engine.launched and (step is None or len(engine.launched) > ahead):
            engine.complete()
    engine.drain()
    return found


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_steady_step_is_the_one_that_would_be_scheduled(ahead: int) -> None:
    advance, steady = DecodeBatch.advance, 0

    def counted(batch: DecodeBatch) -> object:
        nonlocal steady
        steady += 1
        return advance(batch)

    for seed in range(25):
        with patch.object(DecodeBatch, "advance", counted):
            found = steps_of(seed, ahead=ahead)
        with patch.object(DecodeBatch, "look_ahead", lambda batch: None):
            assert found == steps_of(seed, ahead=ahead)
    assert steady > 100, "hardly a step was steady"


def test_a_stretch_ends_with_a_page_and_with_the_last_token() -> None:
    engine = Engine(page_size=4, num_pages=9, max_running=2, lookahead=0)
    engine.add([1, 2, 3], SamplingParams(max_tokens=7, ignore_eos=True))
    taken = []
    while engine.scheduler.has_work:
        step = engine.launch()
        assert step is not None
        batch = engine.scheduler._decode_batch
        taken.append((bool(step.page_updates), 0 if batch is None else batch.steady_steps))
        engine.complete()
    # The prompt; position 3; then a page every four tokens, the last of them for a token that ends it.
    assert taken == [(True, 0), (False, 0), (True, 3), (False, 2), (False, 1), (False, 0), (True, 0)]
