"""What scripts for vLLM use of `AsyncLLM`: chats, vectors, pauses, questions while others are served."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato import AsyncEngineArgs, AsyncLLM, AsyncLLMEngine, PoolingParams, RequestError, SamplingParams

from .conftest import TinyModel
from .vllm_models import text_model

GREEDY = SamplingParams(temperature=0, max_tokens=6)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def llm(model: TinyModel) -> Iterator[AsyncLLM]:
    llm = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(model=model.directory, enforce_eager=True, max_model_len=128)
    )
    yield llm
    llm.shutdown()
    assert llm.errored


def run(made: Callable[[], Awaitable[Any]]) -> Any:
    async def within_time() -> Any:
        return await asyncio.wait_for(made(), 60)

    return asyncio.run(within_time())


async def last(outputs: Any) -> Any:
    found = [output async for output in outputs]
    return found[-1]


def test_a_chat_streams(llm: AsyncLLM) -> None:
    async def main() -> None:
        talk = [{"role": "user", "content": "Hello"}]
        output = await last(llm.chat(talk, GREEDY, "mine"))
        assert (output.request_id, output.prompt) == ("mine", "<|turn|>u:Hello<|turn|>a:")
        assert len(output.outputs[0].token_ids) == 6
        with pytest.raises(RequestError, match="no place for tools"):
            await last(llm.chat(talk, GREEDY, tools=[{"a": 1}], chat_template="{{ messages }}"))
        with pytest.raises(TypeError, match="chat_templat"):
            await last(llm.chat(talk, GREEDY, chat_templat="x"))

    run(main)


def test_vectors_come_beside_streams(llm: AsyncLLM, model: TinyModel) -> None:
    async def main() -> None:
        async def stream() -> Any:
            return await last(llm.generate([5, 6, 7], LONG, "stream"))

        streaming = asyncio.create_task(stream())
        vectors = [await last(llm.encode("Hello", PoolingParams(), f"v{at}")) for at in range(3)]
        assert [vector.request_id for vector in vectors] == ["v0", "v1", "v2"]
        assert all(vector.outputs.data.norm() == pytest.approx(1.0, abs=1e-5) for vector in vectors)
        output = await streaming
        assert output.outputs[0].token_ids == model.greedy((5, 6, 7), 60)
        for params, prompt, message in (
            (PoolingParams(task="classify"), "a", "no classification head"),
            (PoolingParams(), "x" * 500, "cannot fit"),
            (None, "a", "pooling_params must be PoolingParams, not None"),
        ):
            with pytest.raises(RequestError, match=message):
                await last(llm.encode(prompt, params))

    run(main)


@pytest.mark.parametrize(("mode", "tokens"), [("keep", 60), ("wait", 60), ("abort", None)])
def test_what_a_pause_does_to_requests(llm: AsyncLLM, mode: str, tokens: int | None) -> None:
    async def main() -> None:
        seen: list[int] = []

        async def stream() -> Any:
            async for output in llm.generate("Once upon a time", LONG):
                seen.append(len(output.outputs[0].token_ids))
            return output

        streaming = asyncio.create_task(stream())
        while not seen:
            await asyncio.sleep(0.001)
        await llm.pause_generation(mode=mode)
        assert await llm.is_paused()
        if mode == "keep":
            assert not streaming.done()
        else:
            output = await streaming
            assert output.outputs[0].finish_reason == ("length" if mode == "wait" else "abort")
        late = asyncio.create_task(last(llm.generate("late", GREEDY)))
        await asyncio.sleep(0.05)
        assert not late.done(), "nothing runs"
        await llm.resume_generation()
        assert (await late).finished
        output = await streaming
        assert tokens is None or len(output.outputs[0].token_ids) == tokens

    run(main)


def test_a_pause_of_no_kind_is_refused(llm: AsyncLLM) -> None:
    with pytest.raises(RequestError, match="unknown mode 'nap': use abort, wait, keep"):
        run(lambda: llm.pause_generation(mode="nap"))


def test_several_are_aborted_at_once(llm: AsyncLLM) -> None:
    async def main() -> None:
        tasks = [asyncio.create_task(last(llm.generate("a", LONG, name))) for name in ("x", "y")]
        await asyncio.sleep(0.01)
        await llm.abort(["x", "y", "unknown"])
        assert [(await task).outputs[0].finish_reason for task in tasks] == ["abort", "abort"]

    run(main)


def test_questions_while_serving(llm: AsyncLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path))

    async def main() -> None:
        await llm.start_profile()
        streaming = asyncio.create_task(last(llm.generate("Hello", LONG)))
        assert (await llm.get_model_config()).max_model_len == 128
        assert llm.get_tokenizer().eos_token_id == 130
        await llm.check_health()
        assert await llm.reset_prefix_cache(reset_running_requests=True)
        assert len((await streaming).outputs[0].token_ids) == 60
        found = {metric.name: metric for metric in await llm.get_metrics()}
        assert found["vllm:generation_tokens"].value >= 60  # type: ignore[attr-defined]
        assert await llm.stop_profile()
        assert llm.is_running

    run(main)
    assert len(list(tmp_path.iterdir())) == 1
