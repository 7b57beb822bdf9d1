"""Calls that an engine was not made for: each is served or refused in plain words, and leaves nothing behind.

After every one of them the next answer is that of transformers, no request is left, and no page is held.
"""

import asyncio
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ostinato.engine.async_llm import AsyncLLM
from ostinato.engine.delivery.completion_text import CompletionText
from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import RequestError, SamplingParams

from .conftest import TinyModel, prompts_of
from .test_engine_greedy import GREEDY, SMALL, TOKENS, assert_all_back

GOOD = prompts_of((5, 20, 33))
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_text: TinyModel) -> Iterator[LLM]:
    with LLM(tiny_text.directory, **SMALL) as llm:
        yield llm


@pytest.fixture(autouse=True)
def serves_on(request: pytest.FixtureRequest, tiny_text: TinyModel) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        assert_serves_on(request.getfixturevalue("llm"), tiny_text)


def assert_serves_on(llm: LLM, model: TinyModel) -> None:
    """Nothing is left of what was before, and the next answer is right."""
    assert_all_back(llm)
    engine = llm.engine
    assert not engine._served
    assert not engine._taken_names
    assert not engine._delivery._completions
    [output] = llm.generate([GOOD[0]], GREEDY)
    assert output.outputs[0].token_ids == right(model, GOOD[0])


EVEN = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


def right(model: TinyModel, prompt: dict[str, list[int]], count: int = TOKENS) -> list[int]:
    return model.greedy(tuple(prompt["prompt_token_ids"]), count)


class Sly(dict[str, Any]):
    """A prompt that fails when it is read."""

    def get(self, *_: Any) -> Any:
        raise ZeroDivisionError("a trap")

    def __getitem__(self, name: str) -> Any:
        raise ZeroDivisionError("a trap")


WRONG_PARAMS = [{"temperature": 0}, "greedy", 7, LONG.__class__, object()]


@pytest.mark.parametrize("wrong", WRONG_PARAMS, ids=lambda wrong: type(wrong).__name__)
def test_parameters_of_a_wrong_type_are_refused_before_anything_is_queued(llm: LLM, wrong: Any) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate(GOOD[:2], wrong)
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.generate(GOOD[:2], [GREEDY, wrong])
    with pytest.raises(RequestError, match="SamplingParams"):
        next(llm.stream(GOOD[0], wrong))
    with pytest.raises(RequestError, match="SamplingParams"):
        llm.engine.add(GOOD[0], wrong)


def test_more_completions_than_can_be_meant(llm: LLM) -> None:
    with pytest.raises(RequestError, match="n must be at most"):
        llm.generate(GOOD[0], SamplingParams(n=10**9))


@pytest.mark.parametrize("prompts", [7, None, 1.5], ids=str)
def test_what_is_no_list_of_prompts(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompts, GREEDY)
    with pytest.raises(RequestError, match="prompt"):
        llm.embed(prompts)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        (Sly(prompt_token_ids=[1]), ZeroDivisionError),
        ({"prompt_token_ids": [1], "prompt": object()}, None),
        ("\ud800", None),
    ],
    ids=["trap", "text-of-a-wrong-type", "surrogate"],
)
def test_a_prompt_that_fails_takes_none_of_its_list_along(
    llm: LLM, tiny_text: TinyModel, prompt: Any, error: type[Exception] | None
) -> None:
    """What the engine can name is the error of that prompt; what a caller's own code raises is raised."""
    for _ in range(3):
        if error is not None:
            with pytest.raises(error):
                llm.generate([GOOD[0], prompt, GOOD[1]], GREEDY)
        else:
            first, bad, last = llm.generate([GOOD[0], prompt, GOOD[1]], GREEDY)
            assert bad.error is not None
            assert first.outputs[0].token_ids == right(tiny_text, GOOD[0])
            assert last.outputs[0].token_ids == right(tiny_text, GOOD[1])
        assert_all_back(llm)
    with pytest.raises(error or RequestError):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize("name", [7, ["a"], b"a"], ids=str)
def test_a_request_id_of_a_wrong_type(llm: LLM, name: Any) -> None:
    with pytest.raises(RequestError, match="request id"):
        llm.engine.add(GOOD[0], GREEDY, name)


def test_ids_that_meet_those_of_siblings(llm: LLM) -> None:
    engine = llm.engine
    engine.add(GOOD[0], GREEDY, "a.1")
    with pytest.raises(RequestError, match="already"):
        engine.add(GOOD[0], SamplingParams(n=3, max_tokens=2), "a")
    engine.abort("a.1")


def test_a_failure_between_siblings_takes_all_of_them_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = llm.engine.core
    add, calls = core.add, []

    def third_fails(request: Any) -> None:
        calls.append(request)
        if len(calls) == 3:
            raise MemoryError
        add(request)

    monkeypatch.setattr(core, "add", third_fails)
    with pytest.raises(MemoryError):
        llm.generate(GOOD[0], SamplingParams(n=4, max_tokens=2))
    monkeypatch.undo()


def test_embeddings_that_fail_half_way_leave_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        llm.embed([GOOD[0], Sly(prompt_token_ids=[1])])
    assert_all_back(llm)
    step, calls = llm.engine.core.step, []

    def second_fails() -> Any:
        calls.append(0)
        if len(calls) == 2:
            raise MemoryError
        return step()

    monkeypatch.setattr(llm.engine.core, "step", second_fails)
    with pytest.raises(MemoryError):
        llm.embed(GOOD)
    monkeypatch.undo()


def test_an_exception_where_a_text_is_made_ends_its_step_only(
    llm: LLM, tiny_text: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a tokenizer that fails on a token would do."""
    find, calls = CompletionText.find_stop, []

    def fails(self: CompletionText, **options: bool) -> str | None:
        calls.append(0)
        if len(calls) == 4:
            raise ValueError("no such token")
        return find(self, **options)

    monkeypatch.setattr(CompletionText, "find_stop", fails)
    waits = SamplingParams(temperature=0, max_tokens=TOKENS, stop=["never said"])
    # Four run at once, so that the fifth is in no step that fails.
    outputs = llm.generate([GOOD[0]] * 4 + [GOOD[1]], [waits] * 4 + [GREEDY])
    assert all("no such token" in (output.error or "") for output in outputs[:4])
    assert all(output.outputs[0].finish_reason == "error" for output in outputs[:4])
    assert outputs[4].error is None
    assert outputs[4].outputs[0].token_ids == right(tiny_text, GOOD[1])


def test_generators_that_are_left_in_any_way(llm: LLM) -> None:
    never_begun = llm.stream(GOOD[0], LONG)
    left = llm.stream(GOOD[1], LONG)
    next(left)
    closed = llm.stream(GOOD[2], LONG)
    next(closed)
    closed.close()  # type: ignore[attr-defined]
    failing = llm.stream(GOOD[2], LONG)
    next(failing)
    with pytest.raises(ZeroDivisionError):
        failing.throw(ZeroDivisionError())  # type: ignore[attr-defined]
    del never_begun, left
    gc.collect()


def test_streams_side_by_side_and_a_call_between_them(llm: LLM, tiny_text: TinyModel) -> None:
    streams = [llm.stream(prompt, LONG) for prompt in GOOD[:2]]
    texts = ["", ""]
    for turn in range(6):
        for at, stream in enumerate(streams):
            texts[at] += next(stream)
        if turn == 2:
            [output] = llm.generate([GOOD[2]], GREEDY)
            assert output.outputs[0].token_ids == right(tiny_text, GOOD[2])
    for at, stream in enumerate(streams):
        texts[at] += "".join(stream)
        assert texts[at] == llm.generate(GOOD[at], LONG)[0].outputs[0].text


def test_threads_are_served_side_by_side(llm: LLM, tiny_text: TinyModel) -> None:
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(2):
                prompts = prompts_of((5 + seed, 20, 9 + turn), seed=seed)
                if turn == 1:
                    text = "".join(llm.stream(prompts[0], EVEN))
                    assert text == llm.generate(prompts[0], EVEN)[0].outputs[0].text
                for prompt, output in zip(prompts, llm.generate(prompts, EVEN), strict=True):
                    assert output.outputs[0].token_ids == right(tiny_text, prompt)
                assert len(llm.embed(prompts)) == 3
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    if problems:
        raise problems[0]


def test_a_call_from_inside_a_step_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core_step = llm.engine.core.step
    refused: list[str] = []

    def calls_back() -> Any:
        for call in (lambda: llm.generate(GOOD[1], GREEDY), lambda: llm.engine.add(GOOD[1], GREEDY)):
            try:
                call()
            except RequestError as error:
                refused.append(str(error))
        return core_step()

    monkeypatch.setattr(llm.engine.core, "step", calls_back)
    [output] = llm.generate([GOOD[0]], SamplingParams(temperature=0, max_tokens=2))
    assert output.error is None
    monkeypatch.undo()
    assert refused
    assert all("from inside" in text for text in refused)


def _in_child(llm: LLM, kind: str, said: Any) -> None:
    try:
        if kind == "generate":
            llm.generate(GOOD[0], GREEDY)
        elif kind == "stream":
            next(llm.stream(GOOD[0], GREEDY))
        elif kind == "embed":
            llm.embed(GOOD)
        said.put("served")
    except RequestError as error:
        llm.close()  # does nothing, and above all it does not hang
        said.put(str(error))


@pytest.mark.parametrize("kind", ["generate", "stream", "embed"])
def test_a_forked_child_is_told_at_once(llm: LLM, kind: str) -> None:
    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()
    with llm.engine.turn:  # as if a thread of the parent were in the middle of a step
        child = context.Process(target=_in_child, args=(llm, kind, said))
        child.start()
    child.join(20)
    if child.is_alive():
        child.kill()
        raise AssertionError("the child hangs")
    answer = said.get()
    assert "forked" in answer
    assert str(os.getpid()) in answer


def test_a_forked_child_of_an_async_engine_is_told_at_once(tiny_text: TinyModel) -> None:
    llm = AsyncLLM(tiny_text.directory, **SMALL)

    async def ask() -> str:
        try:
            async for output in llm.generate(GOOD[0], GREEDY):
                last = output
            return str(last.outputs[0].token_ids)
        except RequestError as error:
            return str(error)

    def in_child(said: Any) -> None:
        said.put(asyncio.run(ask()))
        llm.close()

    context = multiprocessing.get_context("fork")
    said = context.SimpleQueue()
    child = context.Process(target=in_child, args=(said,))
    child.start()
    child.join(20)
    if child.is_alive():
        child.kill()
        raise AssertionError("the child hangs")
    assert "forked" in said.get()
    assert asyncio.run(ask()) == str(right(tiny_text, GOOD[0]))
    llm.close()


@pytest.mark.parametrize(
    "surroundings",
    [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.device("meta")],
    ids=["inference mode", "autocast", "default device"],
)
def test_what_the_caller_sets_for_its_own_tensors_does_not_matter(
    llm: LLM, tiny_text: TinyModel, surroundings: Any
) -> None:
    expected = [right(tiny_text, prompt) for prompt in GOOD]
    embedding = llm.embed(GOOD[1])[0].outputs.embedding
    with surroundings():
        other = LLM(tiny_text.directory, **SMALL)
        assert other.embed(GOOD[1])[0].outputs.embedding == embedding
    with other:
        assert other.embed(GOOD[1])[0].outputs.embedding == embedding
        with surroundings():
            assert [output.outputs[0].token_ids for output in other.generate(GOOD, GREEDY)] == expected
            if surroundings is torch.inference_mode:
                assert torch.is_inference_mode_enabled()
        assert [output.outputs[0].token_ids for output in other.generate(GOOD, GREEDY)] == expected
        assert not other.graph_report().eager_steps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_type_does_not_matter(llm: LLM, tiny_text: TinyModel, dtype: torch.dtype) -> None:
    asked = [
        SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=1, max_tokens=6, logprobs=2),
        SamplingParams(temperature=1.1, presence_penalty=0.7, repetition_penalty=1.2, seed=2, max_tokens=6),
        SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=list(range(60)), max_tokens=6),
        SamplingParams(temperature=0.8, min_p=0.05, logit_bias={5: 3.0, 6: -100.0}, seed=3, max_tokens=6),
    ]

    def answers(of: LLM) -> list[Any]:
        outputs = of.generate([GOOD[0]] * len(asked), asked)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    expected, embedding = answers(llm), llm.embed(GOOD[1])[0].outputs.embedding
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with LLM(tiny_text.directory, **SMALL) as other:
            assert answers(other) == expected
            assert other.embed(GOOD[1])[0].outputs.embedding == embedding
            assert other.verify().passed
    finally:
        torch.set_default_dtype(before)


def test_use_after_close(tiny_text: TinyModel) -> None:
    llm = LLM(tiny_text.directory, **SMALL)
    begun = llm.stream(GOOD[0], LONG)
    next(begun)
    engine = llm.engine
    llm.close()
    llm.close()
    for use in (
        lambda: llm.generate(GOOD[0], GREEDY),
        lambda: llm.chat([{"role": "user", "content": "a"}], GREEDY),
        lambda: next(llm.stream(GOOD[0], GREEDY)),
        lambda: list(begun),
        lambda: llm.embed(GOOD),
        lambda: llm.graph_report(),
        lambda: engine.add(GOOD[0], GREEDY),
        lambda: engine.step(),
    ):
        with pytest.raises(RequestError, match="closed"):
            use()


def test_close_in_the_middle_of_a_call_of_another_thread(tiny_text: TinyModel) -> None:
    llm = LLM(tiny_text.directory, **SMALL)
    ended: list[BaseException | list[Any]] = []

    def work() -> None:
        try:
            while True:
                llm.generate(GOOD, LONG)
        except BaseException as problem:
            ended.append(problem)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    llm.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a thread hangs"
    assert [type(problem) for problem in ended] == [RequestError, RequestError]
    assert all("closed" in str(problem) for problem in ended)


def test_two_engines_in_a_process(llm: LLM, tiny_text: TinyModel, shallow: TinyModel) -> None:
    with LLM(shallow.directory, **SMALL) as other:
        stream = llm.stream(GOOD[1], LONG)
        beginning = next(stream)
        for prompt in GOOD:
            [output] = other.generate([prompt], GREEDY)
            assert output.outputs[0].token_ids == right(shallow, prompt)
            [output] = llm.generate([prompt], GREEDY)
            assert output.outputs[0].token_ids == right(tiny_text, prompt)
    # The other's end takes nothing of this one along.
    assert beginning + "".join(stream) == llm.generate(GOOD[1], LONG)[0].outputs[0].text
