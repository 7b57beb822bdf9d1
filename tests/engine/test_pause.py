"""An engine that is paused: who goes on, who waits, and what is computed again."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from ostinato import LLM, AsyncLLM, SamplingParams
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.parameters.sampling_params import RequestError
from ostinato.engine.sleeping.sleeper import EngineAsleepError

from .conftest import TinyModel, prompts_of
from .test_sleep import OPTIONS

GREEDY = SamplingParams(temperature=0, max_tokens=8)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPTS = prompts_of((3, 21, 40))


@pytest.fixture(scope="module")
def served(tiny: TinyModel) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny.directory, **OPTIONS)
    yield llm
    llm.close()


@pytest.fixture
def llm(served: AsyncLLM) -> Iterator[LLM]:
    """Its engine step by step; nobody else steps while nothing is asked of `served`."""
    yield served._llm
    served._llm.wake_up()
    assert not served._llm.engine.has_work
    served._llm.engine.core.scheduler.check_integrity()


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def drive(llm: LLM) -> None:
    while llm.engine.core.can_step:
        llm.engine.step()


@pytest.mark.parametrize("clear_cache", [False, True])
def test_requests_that_are_kept_are_computed_again_with_a_clear_cache_only(llm, tiny, clear_cache):
    served = [llm.engine.add(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(3):
        llm.engine.step()
    before = llm.engine.core.scheduler.num_preemptions
    llm.pause_generation(mode="keep", clear_cache=clear_cache)
    assert llm.is_paused()
    assert (llm.engine.core.scheduler.num_preemptions > before) == clear_cache
    assert not llm.engine.core.can_step
    llm.pause_generation(mode="keep", clear_cache=False)
    llm.resume_generation()
    llm.resume_generation()
    drive(llm)
    for output in served:
        assert output.outputs[0].token_ids == tiny.greedy(tuple(output.prompt_token_ids), 8)


def test_requests_end_before_a_pause_or_with_it(llm):
    served = [llm.engine.add(prompt, GREEDY) for prompt in PROMPTS]
    llm.engine.step()
    llm.pause_generation(mode="keep")
    llm.pause_generation(wait_for_inflight_requests=True)
    assert [len(output.outputs[0].token_ids) for output in served] == [8, 8, 8]
    served = [llm.engine.add(prompt, GREEDY) for prompt in PROMPTS]
    llm.pause_generation()
    assert [output.outputs[0].finish_reason for output in served] == ["abort"] * 3


def test_a_call_that_would_wait_for_ever_is_refused(llm, tiny):
    llm.pause_generation()
    for call in (llm.generate, llm.embed):
        with pytest.raises(EngineAsleepError, match=r"paused: resume_generation\(\) first"):
            call(PROMPTS)
    assert not llm.engine.has_work
    llm.resume_generation()
    [output] = llm.generate(PROMPTS[:1], GREEDY)
    assert output.outputs[0].token_ids == tiny.greedy(tuple(PROMPTS[0]["prompt_token_ids"]), 8)


def test_waking_up_and_resuming_end_each_others_rest(llm):
    llm.pause_generation()
    llm.sleep()
    llm.wake_up(["weights"])
    assert llm.is_paused()
    llm.wake_up()
    assert not llm.is_paused()
    llm.sleep(level=0)
    llm.resume_generation()
    assert not llm.is_sleeping()
    llm.sleep()
    llm.resume_generation()
    assert llm.is_sleeping(), "its memory is away"


def test_nobody_is_waited_for_but_the_oldest(llm):
    core = llm.engine.core
    first, second = (llm.engine.add(prompt, GREEDY) for prompt in prompts_of((30, 40)))
    while not second.outputs[0].token_ids:
        llm.engine.step()
    assert not core.owes_progress
    llm.reset_prefix_cache(reset_running_requests=True)
    assert core.owes_progress
    llm.engine.abort(first.request_id)
    assert not core.owes_progress
    llm.engine.step()
    llm.reset_prefix_cache(reset_running_requests=True)
    known, steps = len(second.outputs[0].token_ids), 0
    while core.owes_progress:
        assert len(second.outputs[0].token_ids) == known
        llm.engine.step()
        steps += 1
    assert (len(second.outputs[0].token_ids), steps) == (known + 1, 3)
    drive(llm)


def test_whoever_comes_while_others_are_waited_for_waits_for_the_end_of_the_pause(served, llm):
    async def talk() -> None:
        early = served.generate(PROMPTS[0], LONG)
        await anext(early)
        pause = asyncio.create_task(served.pause_generation(mode="wait"))
        again = asyncio.create_task(served.pause_generation(mode="wait"))
        await asyncio.sleep(0)
        late = served.generate(PROMPTS[1], GREEDY)
        first = asyncio.create_task(anext(late))
        given_up = asyncio.create_task(anext(served.generate(PROMPTS[2], GREEDY, request_id="gone")))
        assert len([output async for output in early][-1].outputs[0].token_ids) == 60
        await asyncio.gather(pause, again)
        await asyncio.sleep(0.02)
        assert not first.done()
        assert not given_up.done()
        await served.abort("gone", internal=True)
        assert (await given_up).outputs[0].finish_reason == "abort"
        await served.resume_generation()
        await first
        assert len([output async for output in late][-1].outputs[0].token_ids) == 8

    run(talk())


def test_verls_step(served, llm):
    async def talk() -> None:
        one = served.generate(PROMPTS[0], LONG, request_id="one")
        await anext(one)
        with pytest.raises(TimeoutError):
            await served.wait_for_requests_to_drain(drain_timeout=0.001)
        await served.pause_generation(wait_for_inflight_requests=False, clear_cache=True)
        await served.wait_for_requests_to_drain()
        assert [output async for output in one][-1].outputs[0].finish_reason == "abort"
        await served.resume_generation()
        await served.sleep(level=1)
        await served.wake_up(["weights"])
        await served.wake_up(["kv_cache"])
        assert await served.reset_prefix_cache(reset_connector=True)
        await served.reset_mm_cache()
        await served.reset_encoder_cache()
        outputs = [output async for output in served.generate(PROMPTS[0], GREEDY)]
        assert len(outputs[-1].outputs[0].token_ids) == 8

    run(talk())


def test_one_that_is_waited_for_can_be_aborted_and_a_wait_that_somebody_ends_says_so(served, llm):
    async def talk() -> None:
        one = served.generate(PROMPTS[0], LONG, request_id="one")
        await anext(one)
        sleep = asyncio.create_task(served.sleep(mode="wait"))
        await asyncio.sleep(0)
        await served.abort("one")
        assert [output async for output in one][-1].outputs[0].finish_reason == "abort"
        await sleep
        assert await served.is_sleeping()
        assert await served.is_paused()
        await served.wake_up()
        two = served.generate(PROMPTS[0], LONG)
        await anext(two)
        pause = asyncio.create_task(served.pause_generation(mode="wait"))
        await asyncio.sleep(0)
        await served.resume_generation()
        with pytest.raises(RequestError, match="resumed by another call"):
            await pause
        assert len([output async for output in two][-1].outputs[0].token_ids) == 60

    run(talk())


@pytest.mark.parametrize("was_paused", [False, True])
def test_a_wait_that_is_given_up_leaves_things_as_they_were(served, llm, was_paused):
    async def talk() -> None:
        one = served.generate(PROMPTS[0], LONG, request_id="one")
        await anext(one)
        if was_paused:
            await served.pause_generation(mode="keep")
        for call in (served.sleep(mode="wait"), served.pause_generation(mode="wait")):
            task = asyncio.create_task(call)
            while not llm.engine.core.scheduler.is_draining:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await served.is_paused() is was_paused
        if was_paused:
            await served.resume_generation()
        outputs = [output async for output in served.generate(PROMPTS[1], GREEDY)]
        assert len(outputs[-1].outputs[0].token_ids) == 8
        await served.abort("one")
        assert [output async for output in one][-1].outputs[0].finish_reason == "abort"
        assert not await served.is_sleeping()

    run(talk())


@pytest.mark.parametrize("how", ["sleep", "pause", "reset"])
def test_requests_get_on_however_often_they_are_computed_again(served, llm, tiny, how, monkeypatch):
    """Prompts of three steps, and somebody who takes their pages after each."""
    prompts, is_over, step = prompts_of((40, 38, 5)), False, llm.engine.step

    def slow_step() -> list[RequestOutput]:
        found = step()
        time.sleep(0.005)  # whoever was told has asked again
        return found

    monkeypatch.setattr(llm.engine, "step", slow_step)

    async def disturb() -> None:
        while not is_over:
            if how == "sleep":
                await served.sleep(1, "keep")
                await served.wake_up()
            elif how == "pause":
                await served.pause_generation(mode="keep")
                await served.resume_generation()
            else:
                await served.reset_prefix_cache(reset_running_requests=True)

    async def one(prompt: dict[str, list[int]]) -> None:
        output = [output async for output in served.generate(prompt, GREEDY)][-1]
        assert output.outputs[0].token_ids == tiny.greedy(tuple(prompt["prompt_token_ids"]), 8)

    async def talk() -> None:
        nonlocal is_over
        disturbing = asyncio.create_task(disturb())
        try:
            await asyncio.wait_for(asyncio.gather(*(one(prompt) for prompt in prompts)), 10)
        finally:
            is_over = True
            await disturbing

    run(talk())


def test_who_is_paused_takes_pages_at_once_and_who_ends_owes_nothing(served, llm):
    async def talk() -> None:
        one = served.generate(PROMPTS[2], LONG, request_id="one")
        await anext(one)
        await served.pause_generation(mode="keep")
        await served.pause_generation(mode="keep")
        assert await served.reset_prefix_cache(reset_running_requests=True)
        await served.resume_generation()
        waits = asyncio.create_task(served.sleep(1, "keep"))
        await served.abort("one")
        await waits
        await served.sleep(1, "keep")
        await served.wake_up()

    run(talk())
