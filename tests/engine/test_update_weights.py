"""New weights in an engine: the graphs compute with them, and nothing of the old ones is found again."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.conftest import TinyModel, prompts_of
from engine.test_sleep import graphs_of
from ostinato import LLM, AsyncLLM, SamplingParams
from ostinato.engine.parameters.sampling_params import RequestError
from ostinato.engine.sleeping.sleeper import EngineAsleepError
from ostinato.models.errors import WeightsError
from ostinato.models.weight_update import TornWeightsError
from ostinato.models.weights import checkpoint_tensors

OPTIONS = {"max_model_len": 128, "max_running_requests": 4, "load_format": "dummy", "progress": False}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = prompts_of((40, 21, 17))


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def other(tiny: TinyModel) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """Weights, and what an engine says that was started with them."""
    with LLM(tiny.directory, seed=7, **OPTIONS) as llm:
        views = checkpoint_tensors(llm.engine.core.loaded.model)
        return {name: view.clone() for name, view in views.items()}, tokens(llm)


@pytest.fixture
def llm(tiny: TinyModel) -> Iterator[LLM]:
    with LLM(tiny.directory, **OPTIONS) as llm:
        yield llm


def test_the_same_graphs_say_what_a_fresh_engine_says(llm: LLM, other) -> None:
    weights, wanted = other
    before, graphs = tokens(llm), graphs_of(llm)
    assert before != wanted
    [again] = llm.generate(PROMPTS[:1], GREEDY)
    assert again.num_cached_tokens == 32
    report = llm.update_weights(weights)
    assert (report.version, llm.weight_version, report.missing) == ("1", "1", 0)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == wanted
    assert not any(output.num_cached_tokens for output in outputs), "KV of the old weights"
    assert all(one is two for one, two in zip(graphs_of(llm), graphs, strict=True))
    assert llm.update_weights(weights, version="step 2").version == llm.weight_version == "step 2"


def test_a_refused_update_changes_nothing(llm: LLM, other) -> None:
    weights, _ = other
    before = tokens(llm)
    for bad in ({**weights, "no.such.weight": torch.zeros(1)}, iter([*weights.items(), (1, 2)]), Path("no")):
        with pytest.raises(WeightsError):
            llm.update_weights(bad)
    [again] = llm.generate(PROMPTS[:1], GREEDY)
    assert again.num_cached_tokens == 32, "what is cached is still right"
    assert (tokens(llm), llm.weight_version) == (before, "0")


def test_an_iterator_that_calls_the_engine_finds_no_weights_half_written(llm: LLM, other) -> None:
    weights, _ = other
    before = tokens(llm)

    def with_a_call(call):
        for number, pair in enumerate(weights.items()):
            if number == 3:
                call()
            yield pair

    for call in (llm.engine.step, llm.sleep, llm.wake_up, lambda: llm.update_weights(weights)):
        with pytest.raises(RequestError, match="from inside an update of its weights"):
            llm.update_weights(with_a_call(call))
    assert (tokens(llm), llm.weight_version) == (before, "0")


def test_torn_weights_are_not_computed_with(llm: LLM, other, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, wanted = other
    monkeypatch.setattr("ostinato.engine.sleeping.served_weights.update_weights", torn)
    with pytest.raises(TornWeightsError):
        llm.update_weights(weights)
    monkeypatch.undo()
    with pytest.raises(EngineAsleepError, match="broken off"):
        tokens(llm)
    assert llm.update_weights(weights).missing == 0
    assert tokens(llm) == wanted


def torn(*_: object, **__: object) -> None:
    raise TornWeightsError("an update of weights was broken off: the device")


def test_between_two_steps_of_streams(tiny: TinyModel, other) -> None:
    weights, wanted = other

    async def serve() -> None:
        llm = AsyncLLM(tiny.directory, **OPTIONS)
        try:
            long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            stream = llm.generate(PROMPTS[0], long, request_id="a")
            await anext(stream)
            with pytest.raises(WeightsError):
                await llm.update_weights({"nothing": torch.zeros(1)})
            assert (await llm.update_weights(weights)).version == "1"
            ended = [output async for output in stream][-1]
            assert len(ended.outputs[0].token_ids) == 40
            [after] = [out async for out in llm.generate(PROMPTS[0], GREEDY, request_id="b")][-1:]
            assert after.outputs[0].token_ids == wanted[0]
        finally:
            llm.shutdown()

    asyncio.run(serve())
