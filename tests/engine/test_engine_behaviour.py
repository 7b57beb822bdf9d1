"""What a user expects of `LLM` beside the right tokens: streams, stops, aborts, pauses, and a clean end."""

import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import RequestError, SamplingParams

from .conftest import TinyModel, prompts_of
from .expected_steps import Setup, service_of
from .test_engine_greedy import GREEDY, SMALL, TOKENS, assert_all_back

PROMPTS = prompts_of((9, 40, 2, 21, 33))


AHEAD = [pytest.param(0, id="in-step", marks=pytest.mark.slow), pytest.param(1, id="one-ahead")]


@pytest.fixture(scope="module", params=AHEAD)
def llm(tiny_text: TinyModel, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(tiny_text.directory, steps_ahead=request.param, **SMALL) as llm:
        yield llm


@pytest.fixture(autouse=True)
def everything_comes_back(llm: LLM) -> Iterator[None]:
    before = service_of(llm)
    yield
    scheduler = llm.engine.core.scheduler
    assert not scheduler.running
    assert not scheduler.waiting
    while llm.engine.has_work:  # a step that was ahead of a stop string
        llm.engine.step()
    assert_all_back(llm)
    service = service_of(llm).since(before)
    assert service.replays
    assert service.eager == {}


def greedy_text(llm: LLM, count: int = 40) -> str:
    return llm.generate("Hello", SamplingParams(temperature=0, max_tokens=count))[0].outputs[0].text


# -- several completions ---------------------------------------------------------------------------


def test_n_greedy_completions_are_equal(llm: LLM, tiny_text: TinyModel) -> None:
    [output] = llm.generate(PROMPTS[0], SamplingParams(temperature=0, n=3, max_tokens=TOKENS, logprobs=1))
    expected = tiny_text.greedy(tuple(PROMPTS[0]["prompt_token_ids"]), TOKENS)
    assert [completion.token_ids for completion in output.outputs] == [expected] * 3
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert all(len(completion.logprobs or []) == TOKENS for completion in output.outputs)


def test_more_completions_than_run_at_once(llm: LLM) -> None:
    """Nine in rows for four; each is what its own seed gives alone."""
    params = SamplingParams(n=9, seed=100, temperature=1.3, max_tokens=10)
    [output] = llm.generate(PROMPTS[0], params)
    assert output.finished
    for completion in output.outputs:
        own = SamplingParams(seed=100 + completion.index, temperature=1.3, max_tokens=10)
        [alone] = llm.generate(PROMPTS[0], own)
        assert completion.token_ids == alone.outputs[0].token_ids


def test_each_completion_ends_for_its_own_reason(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=8, temperature=1.5, max_tokens=30)
    [whole] = llm.generate(PROMPTS[0], params)
    stop = whole.outputs[1].token_ids[3]
    stopped = SamplingParams(n=4, seed=8, temperature=1.5, max_tokens=30, stop_token_ids=[stop])
    [output] = llm.generate(PROMPTS[0], stopped)
    for before, after in zip(whole.outputs, output.outputs, strict=True):
        if stop in before.token_ids:
            assert after.token_ids == before.token_ids[: before.token_ids.index(stop) + 1]
            assert (after.finish_reason, after.stop_reason) == ("stop", stop)
        else:
            assert after.token_ids == before.token_ids


def test_aborting_a_prompt_ends_all_its_completions(llm: LLM) -> None:
    output = llm.engine.add(PROMPTS[0], SamplingParams(n=6, seed=1, max_tokens=40))
    for _ in range(8):
        llm.engine.step()
    assert llm.engine.abort(output.request_id) is output
    assert output.finished
    assert {completion.finish_reason for completion in output.outputs} == {"abort"}
    assert len(output.outputs[0].token_ids) > 0
    while llm.engine.has_work:
        llm.engine.step()


def test_a_taken_name_of_a_completion_leaves_nothing_behind(llm: LLM) -> None:
    taken = llm.engine.add(PROMPTS[0], GREEDY, "mine.1")
    try:
        with pytest.raises(RequestError, match="already being served"):
            llm.engine.add(PROMPTS[0], SamplingParams(n=2, max_tokens=40), "mine")
        assert len(llm.engine.core.scheduler.waiting) == 1
    finally:
        while llm.engine.has_work:
            llm.engine.step()
    assert len(taken.outputs[0].token_ids) == TOKENS


# -- stop strings ----------------------------------------------------------------------------------


def test_every_stop_string_across_tokens_cuts_at_its_first_place(llm: LLM) -> None:
    """A token is a character here, so every longer string lies across tokens."""
    text = greedy_text(llm)
    stops = [text[begin : begin + size] for begin, size in itertools.product((1, 5, 12, 20), (1, 2, 5, 9))]
    outputs = llm.generate(
        ["Hello"] * len(stops), [SamplingParams(temperature=0, max_tokens=40, stop=stop) for stop in stops]
    )
    for stop, output in zip(stops, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.text == text[: text.index(stop)], repr(stop)
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        # It ended with the token that completed the stop string, not later.
        assert len(completion.token_ids) <= text.index(stop) + len(stop) + text.count("\ufffd")


def test_of_several_stop_strings_the_first_in_the_text_counts(llm: LLM) -> None:
    text = greedy_text(llm)
    early, late = text[6:9], text[15:19]
    params = SamplingParams(temperature=0, max_tokens=40, stop=[late, early])
    [output] = llm.generate("Hello", params)
    first = min((text.index(stop), stop) for stop in (early, late))
    assert output.outputs[0].text == text[: first[0]]
    assert output.outputs[0].stop_reason == first[1]


def test_a_stop_string_before_min_tokens_does_not_count(llm: LLM) -> None:
    text = greedy_text(llm)
    early = text[2:4]
    params = SamplingParams(temperature=0, max_tokens=40, min_tokens=12, stop=early)
    [output] = llm.generate("Hello", params)
    assert len(output.outputs[0].token_ids) > 12
    assert output.outputs[0].text.startswith(text[:12])


def test_a_stop_string_that_is_complete_with_the_last_token(llm: LLM) -> None:
    text = greedy_text(llm, 10)
    params = SamplingParams(temperature=0, max_tokens=10, stop=text[-3:])
    [output] = llm.generate("Hello", params)
    assert output.outputs[0].text == text[: text.index(text[-3:])]
    assert output.outputs[0].finish_reason == "stop"


# -- streams ---------------------------------------------------------------------------------------

STREAMED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.2, "seed": 5},
    {"temperature": 1.0, "seed": 6, "top_p": 0.8, "frequency_penalty": 1.0},
    {"temperature": 0, "stop": ["q", "zz"]},
    {"temperature": 0, "min_tokens": 5, "stop": "1"},
]


@pytest.mark.parametrize("fields", STREAMED, ids=str)
def test_a_stream_is_the_generated_text(llm: LLM, fields: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=30, **fields)
    [whole] = llm.generate("Once", params)
    pieces = list(llm.stream("Once", params))
    assert "".join(pieces) == whole.outputs[0].text
    assert all(pieces)


def test_two_streams_and_a_generation_at_once(llm: LLM) -> None:
    params = [SamplingParams(temperature=1.1, seed=seed, max_tokens=25) for seed in (1, 2, 3)]
    alone = [llm.generate("Once", one)[0].outputs[0].text for one in params]
    first, second = llm.stream("Once", params[0]), llm.stream("Once", params[1])
    read = [[next(first)], [next(second)]]
    [meanwhile] = llm.generate(["Once"], params[2])
    for pieces, stream in zip(read, (first, second), strict=True):
        pieces.extend(stream)
    assert ["".join(pieces) for pieces in read] == alone[:2]
    assert meanwhile.outputs[0].text == alone[2]


def test_leaving_a_stream_gives_everything_back(llm: LLM) -> None:
    stream = llm.stream("Once", SamplingParams(temperature=0, max_tokens=40))
    next(stream)
    assert llm.engine.core.scheduler.running
    stream.close()


# -- aborts and pauses -----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(12))
def test_an_abort_at_any_step_keeps_what_there_is_and_disturbs_nobody(
    llm: LLM, tiny_text: TinyModel, steps: int
) -> None:
    """Five prompts in rows for four: one waits, one is in the middle of its prompt, others decode."""
    outputs = [llm.engine.add(prompt, GREEDY) for prompt in PROMPTS]
    for _ in range(steps):
        llm.engine.step()
    victim = outputs[steps % len(outputs)]
    was_finished = victim.finished
    ended = llm.engine.abort(victim.request_id)
    assert (ended is None) == was_finished
    count = len(victim.outputs[0].token_ids)
    while llm.engine.has_work:
        llm.engine.step()
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = tiny_text.greedy(tuple(prompt["prompt_token_ids"]), TOKENS)
        if output is victim and not was_finished:
            assert output.outputs[0].finish_reason == "abort"
            assert output.outputs[0].token_ids == expected[:count]
        else:
            assert output.outputs[0].finish_reason == "length"
            assert output.outputs[0].token_ids == expected
    assert llm.engine.abort(victim.request_id) is None


def test_names_are_unique_while_they_are_served(llm: LLM) -> None:
    output = llm.engine.add(PROMPTS[0], GREEDY, "mine")
    with pytest.raises(RequestError, match="request mine is already being served: choose another id"):
        llm.engine.add(PROMPTS[1], GREEDY, "mine")
    while not output.finished:
        llm.engine.step()
    again = llm.engine.add(PROMPTS[0], GREEDY, "mine")
    while not again.finished:
        llm.engine.step()
    assert again.outputs[0].token_ids == output.outputs[0].token_ids


def test_pause_and_resume_change_no_token(llm: LLM, tiny_text: TinyModel) -> None:
    scheduler = llm.engine.core.scheduler
    outputs = [llm.engine.add(prompt, GREEDY) for prompt in PROMPTS[:4]]
    for pause_after in (2, 3, 4):
        for _ in range(pause_after):
            llm.engine.step()
        scheduler.pause()
        assert scheduler.is_paused
        llm.engine.step()  # a step ahead is still taken in
        held = service_of(llm), [len(output.outputs[0].token_ids) for output in outputs]
        pages = scheduler.pages.num_free
        for _ in range(5):
            llm.engine.step()
        assert held == (service_of(llm), [len(output.outputs[0].token_ids) for output in outputs])
        assert scheduler.pages.num_free == pages, "requests keep their pages"
        assert llm.engine.has_work
        if len(outputs) == 4:
            outputs.append(llm.engine.add(PROMPTS[4], GREEDY))  # arrives during the pause, and waits
        scheduler.resume()
    assert llm.engine.abort(outputs[1].request_id) is outputs[1]
    while llm.engine.has_work:
        llm.engine.step()
    for at, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        expected = tiny_text.greedy(tuple(prompt["prompt_token_ids"]), TOKENS)
        found = output.outputs[0].token_ids
        assert found == (expected[: len(found)] if at == 1 else expected)


# -- order, limits, seeds --------------------------------------------------------------------------


def test_first_come_first_served(llm: LLM) -> None:
    """Equal requests end in the order in which they came, and outputs are in the order of prompts."""
    equal = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = [llm.engine.add(prompt, equal) for prompt in prompts_of([12] * 9, seed=4)]
    ended: list[str] = []
    while llm.engine.has_work:
        for output in llm.engine.step():
            if output.finished:
                ended.append(output.request_id)
    assert ended == [output.request_id for output in outputs]
    listed = llm.generate(PROMPTS, [SamplingParams(temperature=0, max_tokens=k) for k in (9, 1, 5, 2, 7)])
    assert [len(output.outputs[0].token_ids) for output in listed] == [9, 1, 5, 2, 7]
    assert [output.prompt_token_ids for output in listed] == [p["prompt_token_ids"] for p in PROMPTS]


@pytest.mark.parametrize("max_tokens", [None, 10**6])
def test_a_completion_ends_at_the_model_length(llm: LLM, max_tokens: int | None) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    [output] = llm.generate(PROMPTS[:1], params)
    assert len(output.outputs[0].token_ids) == 64 - 9
    assert output.outputs[0].finish_reason == "length"


def test_a_seed_gives_the_same_in_any_company(llm: LLM) -> None:
    wanted = SamplingParams(temperature=1.2, top_p=0.95, seed=42, max_tokens=20)
    [alone] = llm.generate(PROMPTS[:1], wanted)
    for company in range(1, 8):
        others = prompts_of(range(3, 3 + company), seed=company)
        kinds = [SamplingParams(temperature=1.0, max_tokens=5 + at) for at in range(company)]
        at = company // 2
        prompts = [*others[:at], PROMPTS[0], *others[at:]]
        params = [*kinds[:at], wanted, *kinds[at:]]
        assert llm.generate(prompts, params)[at].outputs[0].token_ids == alone.outputs[0].token_ids


def test_the_engine_s_seed_makes_a_run_repeatable(llm: LLM, tiny_text: TinyModel) -> None:
    hot = SamplingParams(temperature=1.5, max_tokens=10)

    def run(seed: int) -> list[list[int]]:
        with LLM(tiny_text.directory, seed=seed, **{**SMALL, "disable_cuda_graph": True}) as other:
            return [output.outputs[0].token_ids for output in other.generate(PROMPTS[:3], hot)]

    assert run(1) == run(1)
    assert run(1) != run(2)
    llm.generate(PROMPTS[:1], hot)


# -- the end ---------------------------------------------------------------------------------------


def test_leaving_the_context_frees_weights_cache_and_graphs(llm: LLM, tiny_text: TinyModel) -> None:
    """Also with an exception, and with a request under way."""
    llm.generate(PROMPTS[:1], GREEDY)
    kept: list[weakref.ref[Any]] = []

    def fail_in_the_middle() -> None:
        with LLM(tiny_text.directory, **Setup().options) as other:
            other.generate(PROMPTS, GREEDY)
            core = other.engine.core
            tensors = [*core.loaded.model.parameters(), *core.runner.kv.named_tensors().values()]
            kept.extend(weakref.ref(thing) for thing in (core, core.runner, core.loaded.model, *tensors))
            other.engine.add(PROMPTS[0], GREEDY)
            other.engine.step()
            raise LookupError("in the middle")

    with pytest.raises(LookupError, match="in the middle"):
        fail_in_the_middle()
    gc.collect()
    alive = [type(ref()).__name__ for ref in kept if ref() is not None]
    assert not alive
