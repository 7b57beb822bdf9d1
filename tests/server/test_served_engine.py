"""What the engine process tells of its steps: every token once, in order, and each end with its reason."""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.server.engine_process.engine_controls import EngineControls
from ostinato.server.engine_process.served_engine import ServedEngine
from ostinato.server.wire.messages import Embed, Generate, News, StepNews

SMALL = {"max_model_len": 64, "max_running_requests": 4, "num_pages": 40, "cuda_graph_mode": "none"}


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), steps_ahead=1, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def sleepy(model: Path) -> Iterator[LLM]:
    with LLM(str(model), enable_sleep_mode=True, chunked_prefill_size=16, **SMALL) as llm:
        yield llm


@pytest.fixture
def engine(llm: LLM) -> ServedEngine:
    return ServedEngine(llm.engine.core)


def prompt(llm: LLM, text: str) -> list[int]:
    ids: list[int] = llm.tokenizer.encode(text)
    return ids


def test_every_token_is_told_once_and_every_end_with_its_reason(llm: LLM, engine: ServedEngine) -> None:
    """Requests that join and leave at different steps, more than there are rows, one with logprobs."""
    texts = ["a", "b", "cd", "A", "B", "abcdefgh"]
    params = [
        SamplingParams(temperature=0, max_tokens=3 + 4 * at, ignore_eos=True, logprobs=1 if at == 2 else None)
        for at in range(len(texts))
    ]
    alone = [llm.generate(text, one)[0].outputs[0].token_ids for text, one in zip(texts, params, strict=True)]
    told: dict[int, list[int]] = {id: [] for id in range(len(texts))}
    ended: dict[int, News] = {}
    num_plain = 0
    for id, (text, one) in enumerate(zip(texts, params, strict=True)):
        assert engine.generate(Generate(id, prompt(llm, text), one)) == []
    while engine.is_busy:
        step = engine.step()
        assert len(step.ids) == len(step.tokens)
        num_plain += len(step.ids)
        for id, token in zip(step.ids, step.tokens, strict=True):
            assert told[id], "the first token is news"
            told[id].append(token)
        for news in step.news:
            assert news.id not in ended
            assert news.token is not None
            told[news.id].append(news.token)
            assert (news.logprobs is None) == (news.id != 2)
            if news.finish_reason is not None:
                ended[news.id] = news
    assert list(told.values()) == alone
    assert {id: news.finish_reason for id, news in ended.items()} == dict.fromkeys(told, "length")
    # All but the first and the last of each that asked for nothing else.
    assert num_plain == sum(len(tokens) - 2 for id, tokens in told.items() if id != 2)


def test_an_embedding_aborted_while_it_is_computed_is_over(llm: LLM, engine: ServedEngine) -> None:
    assert engine.embed(Embed(7, prompt(llm, "abc"), "mean")) == []
    assert engine.embed(Embed(8, prompt(llm, "xyz"), "mean")) == []
    engine.step()
    assert [news.finish_reason for news in engine.abort([7])] == ["abort"]
    told = []
    while engine.is_busy:
        told += engine.step().news
    [news] = told
    assert (news.id, news.finish_reason) == (8, "stop")
    assert news.embedding is not None


def test_the_time_in_the_queue_is_told_once(llm: LLM, engine: ServedEngine) -> None:
    """Four have a row at once; the fifth waits for the end of one, and one that is aborted leaves nothing."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for id in range(6):
        assert engine.generate(Generate(id, prompt(llm, "abc"), params)) == []
    engine.abort([5])
    told: dict[int, list[float]] = {id: [] for id in range(5)}
    while engine.is_busy:
        for news in engine.step().news:
            told[news.id].append(news.queued_seconds)
    assert all(len([seconds for seconds in waits if seconds > 0]) == 1 for waits in told.values())
    assert max(told[4]) > 2 * max(max(told[id]) for id in range(4))
    assert not engine._arrived
    assert not engine._queued
    assert not engine._waiting


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sleep", {"level": 1, "mode": "keep"}),
        ("release_memory", {"tags": None}),
        ("pause", {"mode": "keep", "clear_cache": True}),
        ("reset_prefix_cache", {"running": True}),
    ],
)
def test_what_is_computed_again_gets_on_before_its_pages_are_taken_once_more(
    sleepy: LLM, name: str, options: dict[str, object]
) -> None:
    """A call after every step, and a prompt of four."""
    engine, tokens = ServedEngine(sleepy.engine.core), []

    def tell(step: StepNews) -> None:
        tokens.extend(step.tokens)
        tokens.extend(news.token for news in step.news if news.token is not None)

    controls = EngineControls(sleepy, engine, tell).by_name()
    text = "abcdefgh" * 7
    [alone] = sleepy.generate(text, params := SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    sleepy.reset_prefix_cache()
    assert engine.generate(Generate(1, prompt(sleepy, text), params)) == []
    for at in range(4):
        tell(engine.step())
        called = controls[name](**options)
        while isinstance(called, Generator) and next(called, called) is None:
            tell(engine.step())
        assert len(tokens) == at
        controls["wake_up"](tags=None)
        controls["resume"]()
    while engine.is_busy:
        tell(engine.step())
    assert tokens == alone.outputs[0].token_ids
