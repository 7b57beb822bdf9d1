"""Many coroutines on one engine."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from ostinato.engine.async_llm import AsyncLLM
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.parameters.sampling_params import RequestError, SamplingParams

from .conftest import TinyModel, prompts_of
from .test_engine_greedy import GREEDY, SMALL, TOKENS


@pytest.fixture
def llm(shallow: TinyModel) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(shallow.directory, **SMALL)
    yield llm
    llm.close()


def test_coroutines_are_served_together_and_streamed(llm: AsyncLLM, shallow: TinyModel) -> None:
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
        assert tokens == shallow.greedy(tuple(prompt["prompt_token_ids"]), TOKENS)
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


LONG = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def slow_down(llm: AsyncLLM) -> None:
    """Steps as long as those of a real model, so that one is under way whenever something happens."""
    engine = llm._llm.engine
    step = engine.step

    def slowly() -> list[RequestOutput]:
        time.sleep(0.02)
        return step()

    engine.step = slowly  # type: ignore[method-assign]


async def whole(llm: AsyncLLM, params: SamplingParams = SHORT, name: str | None = None) -> RequestOutput:
    [prompt] = prompts_of((5,))
    return [output async for output in llm.generate(prompt, params, name)][-1]


def is_forgotten(llm: AsyncLLM) -> bool:
    """Whether the engine's thread soon knows of no request any more."""
    deadline = time.monotonic() + 10
    while llm._inboxes.names or llm._inboxes.listeners or llm._llm.engine.has_work:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_loop_that_closes_takes_nobody_with_it(llm: AsyncLLM) -> None:
    [prompt] = prompts_of((5,))

    async def leave() -> None:
        async for _ in llm.generate(prompt, LONG):
            break

    slow_down(llm)
    for _ in range(10):
        asyncio.run(leave())
    assert asyncio.run(asyncio.wait_for(whole(llm), 10)).finished
    assert is_forgotten(llm)


def test_a_name_may_be_used_again_at_once(llm: AsyncLLM) -> None:
    [prompt] = prompts_of((5,))

    async def twice() -> RequestOutput:
        async for output in llm.generate(prompt, SHORT, "a"):
            if output.finished:
                break
        return await asyncio.wait_for(whole(llm, SHORT, "a"), 10)

    assert asyncio.run(twice()).outputs[0].finish_reason == "length"


def test_inboxes_of_one_name_are_given_up_in_any_order(llm: AsyncLLM) -> None:
    async def run() -> None:
        [prompt] = prompts_of((5,))
        first, second = (llm.generate(prompt, SHORT, "a") for _ in range(2))
        async for output in first:
            if output.finished:
                async for _ in second:
                    pass
                break
        await first.aclose()  # type: ignore[attr-defined]

    asyncio.run(run())
    assert asyncio.run(asyncio.wait_for(whole(llm), 10)).finished


def test_a_request_that_is_cancelled_before_it_has_a_name_is_aborted(llm: AsyncLLM) -> None:
    async def run() -> None:
        task = asyncio.create_task(whole(llm, LONG, "a"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    slow_down(llm)
    asyncio.run(run())
    began = time.monotonic()
    assert is_forgotten(llm)
    assert time.monotonic() - began < 0.02 * 40, "it ran to its end"


def test_everybody_is_told_of_the_end_though_one_loop_is_gone(llm: AsyncLLM) -> None:
    [prompt] = prompts_of((5,))
    slow_down(llm)
    gone, forgotten = asyncio.new_event_loop(), llm.generate(prompt, LONG)
    gone.run_until_complete(forgotten.__anext__())
    gone.close()
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            asyncio.run(asyncio.wait_for(whole(llm, LONG), 10))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    llm.close()
    thread.join(12)
    assert [type(error) for error in ended] == [RequestError]


def test_a_snapshot_of_prompt_logprobs_stays_as_it_is(shallow: TinyModel) -> None:
    [prompt] = prompts_of((40,))
    with LLM(shallow.directory, **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1, ignore_eos=True)
        output = llm.engine.add(prompt, params)
        llm.engine.step()
        taken = output.snapshot()
        assert taken.prompt_logprobs is not None
        then = list(taken.prompt_logprobs)
        assert None in then[1:], "a chunk is missing"
        while llm.engine.has_work:
            llm.engine.step()
        assert taken.prompt_logprobs == then


def test_a_paused_engine_waits_without_a_turn(llm: AsyncLLM, shallow: TinyModel) -> None:
    [prompt] = prompts_of((5,))
    engine = llm._llm.engine
    turns = 0
    step = engine.step

    def counted() -> list[RequestOutput]:
        nonlocal turns
        turns += 1
        return step()

    engine.step = counted  # type: ignore[method-assign]

    async def run() -> RequestOutput:
        outputs = []
        async for output in llm.generate(prompt, LONG):
            outputs.append(output)
            if len(outputs) == 3:
                llm.pause()
                late = asyncio.create_task(whole(llm))
                await asyncio.sleep(0.05)  # what was under way comes to an end
                before = turns
                await asyncio.sleep(0.1)
                assert turns == before, "it turns in vain"
                assert not late.done()
                llm.resume()
                assert (await late).finished
        return outputs[-1]

    output = asyncio.run(asyncio.wait_for(run(), 30))
    assert output.outputs[0].token_ids == shallow.greedy(tuple(prompt["prompt_token_ids"]), 50)
    assert is_forgotten(llm)


def test_commands_without_end_keep_nobody_from_being_served(llm: AsyncLLM) -> None:
    is_over = False

    def again(engine: object) -> None:
        if not is_over:
            llm._thread.do(again)

    async def run() -> None:
        nonlocal is_over
        waiting = asyncio.create_task(whole(llm))
        await asyncio.sleep(0)
        llm._thread.do(again)
        try:
            assert (await asyncio.wait_for(waiting, 10)).finished
        finally:
            is_over = True

    asyncio.run(run())


def test_a_paused_engine_can_be_aborted_and_closed(llm: AsyncLLM) -> None:
    async def run() -> None:
        llm.pause()
        waiting = asyncio.create_task(whole(llm, LONG, "mine"))
        other = asyncio.create_task(whole(llm, LONG))
        await asyncio.sleep(0.02)
        await llm.abort("mine")
        assert (await asyncio.wait_for(waiting, 10)).outputs[0].finish_reason == "abort"
        await asyncio.to_thread(llm.close)
        with pytest.raises(RequestError, match="closed"):
            await asyncio.wait_for(other, 10)

    asyncio.run(run())
