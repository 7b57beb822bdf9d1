"""Whoever reads an output's text, whenever and however often, reads that of its tokens."""

import asyncio
import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ostinato.engine.async_llm import AsyncLLM
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.text.tokenizer import Tokenizer
from text.small_tokenizers import small_tokenizer

from .conftest import TINY, TinyModel
from .test_engine_errors import fail_once
from .test_engine_greedy import SMALL

KINDS: list[dict[str, Any]] = [
    {},
    {"seed": 3, "temperature": 1.2, "n": 2},
    {"stop": ["\x00never", "qq"]},
    {"detokenize": False},
    {"seed": 4, "temperature": 1.2, "n": 2, "stop": "~~~"},
    {"seed": 5, "temperature": 1.5, "logprobs": 2},
    {"seed": 6, "temperature": 1.5, "skip_special_tokens": False},
]
"""More than there are rows, with and without stop strings, in one batch."""


@pytest.fixture(scope="module", params=[0, 1], ids=["in-step", "one-ahead"])
def llm(tiny_text: TinyModel, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(tiny_text.directory, steps_ahead=request.param, **SMALL) as llm:
        yield llm


def params_of(kind: dict[str, Any], **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 20, "ignore_eos": True, **kind, **fields})


@pytest.fixture(scope="module")
def tokenizer(tiny_text: TinyModel) -> Tokenizer:
    return Tokenizer.from_directory(tiny_text.directory)


def assert_right(tokenizer: Tokenizer, output: RequestOutput, kind: dict[str, Any]) -> None:
    skip = kind.get("skip_special_tokens", True)
    for completion in output.outputs:
        text = tokenizer.detokenizer(skip_special_tokens=skip).push(completion.token_ids)
        if completion.finish_reason is not None:
            # At the end nothing is held back, be it half a character.
            text = tokenizer.decode(completion.token_ids, skip_special_tokens=skip)
        if not kind.get("detokenize", True):
            assert completion.text == ""
        elif "stop" in kind and completion.finish_reason is None:
            assert text.startswith(completion.text)
            assert len(text) - len(completion.text) < 6, "no more than the beginning of a stop string"
        else:
            assert completion.text == text


@pytest.mark.parametrize("every", [1, 3, 7, 100])
def test_text_read_in_the_middle_is_that_of_the_tokens(llm: LLM, tokenizer: Tokenizer, every: int) -> None:
    engine = llm.engine
    outputs = [engine.add("Once", params_of(kind)) for kind in KINDS]
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        for at, (kind, output) in enumerate(zip(KINDS, outputs, strict=True)):
            if (steps + at) % every == 0:
                assert_right(tokenizer, output, kind)
    for kind, output in zip(KINDS, outputs, strict=True):
        assert output.finished
        assert [len(completion.token_ids) for completion in output.outputs] == [20] * kind.get("n", 1)
        assert_right(tokenizer, output, kind)
        assert all(
            len(completion.logprobs or []) == 20 * ("logprobs" in kind) for completion in output.outputs
        )


@pytest.mark.parametrize("is_read", [False, True], ids=["unread", "read"])
def test_an_aborted_output_has_the_text_of_its_tokens(llm: LLM, tokenizer: Tokenizer, is_read: bool) -> None:
    engine = llm.engine
    outputs = [engine.add("Once", params_of(kind)) for kind in KINDS]
    for step in range(9):
        engine.step()
        if is_read and step == 6:
            for kind, output in zip(KINDS, outputs, strict=True):
                assert_right(tokenizer, output, kind)
    for kind, output in zip(KINDS, outputs, strict=True):
        assert engine.abort(output.request_id) is output
        assert_right(tokenizer, output, kind)
    assert any(completion.text for output in outputs for completion in output.outputs)
    while engine.has_work:
        engine.step()
    for kind, output in zip(KINDS, outputs, strict=True):
        assert_right(tokenizer, output, kind)


def test_the_token_that_ends_a_text_is_in_it_only_if_asked_for(llm: LLM) -> None:
    [whole] = llm.generate("Once", params_of({}))
    ids = whole.outputs[0].token_ids
    end = ids[7]
    count = ids.index(end) + 1
    for kind in ({}, {"include_stop_str_in_output": True}, {"stop": "\x00never"}):
        [output] = llm.generate("Once", params_of(kind, stop_token_ids=[end]))
        [completion] = output.outputs
        assert completion.token_ids == ids[:count]
        assert completion.stop_reason == end
        shown = ids[:count] if "include_stop_str_in_output" in kind else ids[: count - 1]
        assert completion.text == llm.tokenizer.decode(shown)


def test_streams_show_every_token_as_soon_as_it_is_there(llm: LLM, tokenizer: Tokenizer) -> None:
    """Beside requests of other kinds, which nobody reads until the end."""
    others = [llm.engine.add("Twice", params_of(kind, max_tokens=9)) for kind in KINDS[1:3]]
    for kind in (KINDS[0], KINDS[2]):
        [whole] = llm.generate("Once", params_of(kind))
        shown, served = "", llm.engine._served
        for piece in llm.stream("Once", params_of(kind)):
            shown += piece
            growing = [found[0] for found in served.values() if found[0].whole.prompt == "Once"]
            for completion in growing:  # none with the last piece
                assert shown == completion.output.text
                assert_right(tokenizer, completion.whole, kind)
        assert shown == whole.outputs[0].text
    for kind, output in zip(KINDS[1:3], others, strict=True):
        assert output.finished
        assert_right(tokenizer, output, kind)


def test_copies_of_an_output_that_grows_stay_as_they_are(llm: LLM) -> None:
    output = llm.engine.add("Once", params_of({}))
    while len(output.outputs[0].token_ids) < 8:
        llm.engine.step()
    then = llm.tokenizer.detokenizer().push(output.outputs[0].token_ids)
    copies = [output.snapshot(), copy.deepcopy(output), pickle.loads(pickle.dumps(output))]
    assert copies == [output] * 3
    shallow = copy.copy(output.outputs[0])
    while llm.engine.has_work:
        llm.engine.step()
    assert [taken.outputs[0].text for taken in copies] == [then] * 3
    assert [len(taken.outputs[0].token_ids) for taken in copies] == [8] * 3
    assert shallow.text == then
    assert len(output.outputs[0].text) > len(then)
    assert pickle.loads(pickle.dumps(output)) == output
    assert f"text={output.outputs[0].text!r}" in repr(output)


def test_completions_that_take_each_other_s_place_get_their_own_tokens(llm: LLM) -> None:
    """Six in rows for four: one leaves, another joins, and the batch is as large as before."""
    hot = params_of({"n": 6, "seed": 7, "temperature": 1.5}, max_tokens=30)
    [whole] = llm.generate("Once", hot)
    stop = whole.outputs[1].token_ids[3]
    [output] = llm.generate("Once", replace(hot, stop_token_ids=[stop]))
    assert {completion.finish_reason for completion in output.outputs} == {"stop", "length"}
    for completion, longer in zip(output.outputs, whole.outputs, strict=True):
        ids = longer.token_ids
        ended = stop in ids
        assert completion.token_ids == (ids[: ids.index(stop) + 1] if ended else ids)
        assert completion.text == llm.tokenizer.decode(ids[: ids.index(stop)] if ended else ids)


def test_what_a_step_ended_is_told_once(llm: LLM) -> None:
    engine = llm.engine
    outputs = [engine.add("Once", params_of({}, n=1 + at % 2, max_tokens=3 + at)) for at in range(5)]
    ended: list[RequestOutput] = []
    while engine.has_work:
        changed = engine.step()
        assert len({id(output) for output in changed}) == len(changed)
        assert all(any(output is grown for grown in changed) for output in engine.ended)
        assert all(output.finished for output in engine.ended)
        ended += engine.ended
    assert sorted(output.request_id for output in ended) == sorted(output.request_id for output in outputs)


@pytest.mark.parametrize("n", [1, 2])
def test_a_stop_string_in_the_step_of_a_failing_launch_counts(
    tiny_text: TinyModel, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """The core has ended the request with an error by the time its text is looked at."""
    with LLM(tiny_text.directory, steps_ahead=1, **SMALL) as llm:
        [whole] = llm.generate("Once", params_of({}))
        stop = whole.outputs[0].text[6:8]
        [stopped] = llm.generate("Once", params_of({}, stop=stop, n=n))
        fail_once(monkeypatch, llm, RuntimeError("fell off"), at=len(stopped.outputs[0].token_ids))
        [output, other] = llm.generate(["Once"] * 2, [params_of({}, stop=stop, n=n), params_of({})])
        assert "fell off" in (other.error or "")
        assert other.outputs[0].token_ids == whole.outputs[0].token_ids[: len(other.outputs[0].token_ids)]
        assert output.error is None
        assert output.outputs == stopped.outputs
        [again] = llm.generate("Once", params_of({}))
        assert again.outputs == whole.outputs


def test_every_output_of_a_coroutine_has_its_own_text(tiny_text: TinyModel, tokenizer: Tokenizer) -> None:
    """Read at once, late, or by a reader who left in the middle."""
    llm = AsyncLLM(tiny_text.directory, **SMALL)

    async def one(kind: dict[str, Any], at: int) -> list[RequestOutput]:
        seen: list[RequestOutput] = []
        async for output in llm.generate("Once", params_of(kind)):
            seen.append(output)
            if at % 2:
                assert_right(tokenizer, output, kind)
            if at == 5 and len(seen) == 4:
                break
        return seen

    async def all_of_them() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(one(kind, at) for at, kind in enumerate(KINDS)))

    try:
        found = asyncio.run(all_of_them())
    finally:
        llm.close()
    for at, (kind, outputs) in enumerate(zip(KINDS, found, strict=True)):
        assert len(outputs) == (4 if at == 5 else len(outputs))
        assert outputs[-1].finished == (at != 5)
        for output in outputs:
            assert_right(tokenizer, output, kind)


def test_a_space_between_prompt_and_answer_stays(tiny_text: TinyModel, tmp_path: Path) -> None:
    small_tokenizer("sentencepiece").backend.save(str(tmp_path / "tokenizer.json"))
    with LLM(tiny_text.directory, tokenizer=str(tmp_path), **SMALL) as llm:
        fitting = [i for i in range(TINY["vocab_size"]) if llm.tokenizer.token_text(i).startswith(" ")]
        params = SamplingParams(temperature=0, max_tokens=2, allowed_token_ids=fitting, logprobs=1)
        (output,) = llm.generate([{"prompt_token_ids": fitting[:1]}], params)
        (answer,) = output.outputs
        assert answer.text.startswith(" ")
        came = [
            entry[token].decoded_token for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)
        ]
        assert "".join(came) == answer.text
