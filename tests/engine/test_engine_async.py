"""Many coroutines on one engine."""

import asyncio
from collections.abc import Iterator

import pytest

from ostinato.engine.async_llm import AsyncLLM
from ostinato.engine.sampling_params import RequestError, SamplingParams

from .conftest import TinyModel, prompts_of
from .test_engine_greedy import GREEDY, SMALL, TOKENS


@pytest.fixture
def llm(tiny: TinyModel) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(tiny.directory, **SMALL)
    yield llm
    llm.close()


def test_coroutines_are_served_together_and_streamed(llm: AsyncLLM, tiny: TinyModel) -> None:
    prompts = prompts_of((5, 20, 33, 2, 40))

    async def one(prompt: dict[str, list[int]]) -> list[int]:
        seen: list[int] = []
        async for output in llm.generate(prompt, GREEDY):
            tokens = output.outputs[0].token_ids
            assert tokens[: len(seen)] == seen
            assert len(tokens) == len(seen) + 1
            seen = tokens
        assert output.finished
        return seen

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(one(prompt) for prompt in prompts))

    for prompt, tokens in zip(prompts, asyncio.run(all_of_them()), strict=True):
        assert tokens == tiny.greedy(tuple(prompt["prompt_token_ids"]), TOKENS)
    assert llm.graph_report().eager_steps == {}


def test_leaving_cancelling_aborting_and_refusals(llm: AsyncLLM) -> None:
    [prompt] = prompts_of((5,))
    long = SamplingParams(temperature=0, max_tokens=50)

    async def left() -> None:
        async for _ in llm.generate(prompt, long):
            break

    async def aborted() -> str | None:
        async for output in llm.generate(prompt, long, "mine"):
            if len(output.outputs[0].token_ids) == 2:
                await llm.abort("mine")
        return output.outputs[0].finish_reason

    async def refused() -> None:
        async for _ in llm.generate({"prompt_token_ids": [999]}, long):
            raise AssertionError("it must not be served")

    async def cancelled() -> None:
        async def consume() -> None:
            async for _ in llm.generate(prompt, long):
                pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def run() -> None:
        await left()
        assert await aborted() == "abort"
        with pytest.raises(RequestError, match="vocabulary"):
            await refused()
        await cancelled()
        outputs = [output async for output in llm.generate(prompt, GREEDY)]
        assert len(outputs[-1].outputs[0].token_ids) == TOKENS

    asyncio.run(run())
    llm.close()

    async def late() -> None:
        async for _ in llm.generate(prompt, GREEDY):
            pass

    with pytest.raises(RequestError, match="closed"):
        asyncio.run(late())
