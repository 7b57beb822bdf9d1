"""Coroutines that ask for what cannot be, or change their minds: nobody else notices."""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato.engine.async_llm import AsyncLLM
from ostinato.engine.parameters.sampling_params import RequestError, SamplingParams

from .conftest import TinyModel, prompts_of
from .test_engine_async import is_forgotten
from .test_engine_greedy import GREEDY, SMALL, TOKENS

LONG = SamplingParams(temperature=0, max_tokens=45, ignore_eos=True)
VICTIM = prompts_of((7,), seed=3)[0]


@pytest.fixture
def llm(tiny_text: TinyModel) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny_text.directory, **SMALL)
    yield llm
    llm.close()


async def tokens_of(llm: AsyncLLM, prompt: Any, params: Any = GREEDY, name: Any = None) -> list[int]:
    return [output async for output in llm.generate(prompt, params, name)][-1].outputs[0].token_ids


def assert_all_back(llm: AsyncLLM) -> None:
    assert is_forgotten(llm)
    scheduler = llm._llm.engine.core.scheduler
    scheduler.check_integrity()
    assert scheduler.pages.num_free == scheduler.pages.num_usable


def test_wrong_types_are_the_error_of_who_gave_them(llm: AsyncLLM, tiny_text: TinyModel) -> None:
    class Sly(dict[str, Any]):
        def __contains__(self, name: object) -> bool:
            raise ZeroDivisionError("a trap")

    async def run() -> list[int]:
        victim = asyncio.create_task(tokens_of(llm, VICTIM, LONG))
        for params in ({"temperature": 0}, "greedy", 7, object()):
            with pytest.raises(RequestError, match="SamplingParams"):
                await tokens_of(llm, VICTIM, params)
        for prompt in (7, None, ["a"], {"prompt": 3}, {"prompt_token_ids": "x"}, "\ud800"):
            with pytest.raises(RequestError):
                await tokens_of(llm, prompt)
        for name in (7, ["a"]):
            with pytest.raises(RequestError, match="request id"):
                await tokens_of(llm, VICTIM, GREEDY, name)
        for name in (7, [7]):
            with pytest.raises(RequestError, match="request id"):
                await llm.abort(name)  # type: ignore[arg-type]
        with pytest.raises(ZeroDivisionError):
            await tokens_of(llm, Sly(prompt="a"))
        return await victim

    tokens = asyncio.run(asyncio.wait_for(run(), 30))
    assert tokens == tiny_text.greedy(tuple(VICTIM["prompt_token_ids"]), 45)
    assert_all_back(llm)


def test_a_step_that_fails_by_a_bug_ends_its_requests_and_the_engine_serves_on(
    llm: AsyncLLM, tiny_text: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = llm._llm.engine.core
    launch, calls = core._launch, []

    def fifth_fails(flight: Any) -> None:
        calls.append(0)
        if len(calls) == 5:
            raise TypeError("a bug")
        launch(flight)

    monkeypatch.setattr(core, "_launch", fifth_fails)

    async def run() -> None:
        with pytest.raises(RequestError, match="a bug"):
            await tokens_of(llm, VICTIM, LONG)
        tokens = await tokens_of(llm, VICTIM)
        assert tokens == tiny_text.greedy(tuple(VICTIM["prompt_token_ids"]), TOKENS)

    asyncio.run(asyncio.wait_for(run(), 30))
    assert_all_back(llm)


async def storm(llm: AsyncLLM, model: TinyModel, count: int, seed: int) -> None:
    chance = random.Random(seed)

    async def one(number: int) -> None:
        [prompt] = prompts_of((chance.randrange(1, 40),), seed=number)
        task = asyncio.create_task(tokens_of(llm, prompt, LONG))
        await asyncio.sleep(chance.choice((0, 0, 0.001, chance.uniform(0, 0.1))))
        task.cancel()
        if chance.random() < 0.3:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def victim() -> None:
        for _ in range(3):
            tokens = await tokens_of(llm, VICTIM)
            assert tokens == model.greedy(tuple(VICTIM["prompt_token_ids"]), TOKENS)

    await asyncio.gather(victim(), *(one(number) for number in range(count)))
    await victim()


def test_a_storm_of_cancellations(llm: AsyncLLM, tiny_text: TinyModel) -> None:
    asyncio.run(asyncio.wait_for(storm(llm, tiny_text, 80, seed=1), 60))
    assert_all_back(llm)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_long_storm_of_cancellations(llm: AsyncLLM, tiny_text: TinyModel, seed: int) -> None:
    asyncio.run(asyncio.wait_for(storm(llm, tiny_text, 2000, seed), 300))
    assert_all_back(llm)


def test_iterators_that_are_never_asked_or_left_open(llm: AsyncLLM) -> None:
    async def run() -> None:
        llm.generate(VICTIM, LONG)
        begun = llm.generate(VICTIM, LONG)
        await begun.__anext__()
        del begun
        await asyncio.sleep(0.01)

    asyncio.run(run())
    assert_all_back(llm)


def test_two_async_engines_in_a_process(
    llm: AsyncLLM, tiny_text: TinyModel, shallow: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path))
    other = AsyncLLM(shallow.directory, **SMALL)

    async def run() -> None:
        prompts = prompts_of((5, 20, 33), seed=8)
        both = [tokens_of(engine, prompt) for prompt in prompts for engine in (llm, other)]
        found = await asyncio.gather(*both)
        for at, tokens in enumerate(found):
            model = (tiny_text, shallow)[at % 2]
            assert tokens == model.greedy(tuple(prompts[at // 2]["prompt_token_ids"]), TOKENS)
        await other.start_profile("left")

    asyncio.run(asyncio.wait_for(run(), 60))
    other.close()
    assert list(tmp_path.glob("left*")), "a profile that is left open is written; torch crashes at exit else"
    assert_all_back(llm)
