"""What cannot be served is refused with a clear error, and the others are served."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import RequestError, SamplingParams

from .conftest import TinyModel, prompts_of
from .test_engine_greedy import GREEDY, SMALL, TOKENS, assert_all_back

GOOD = prompts_of((5, 20, 33))


@pytest.fixture(scope="module")
def llm(tiny_text: TinyModel) -> Iterator[LLM]:
    with LLM(tiny_text.directory, **SMALL) as llm:
        yield llm


@pytest.fixture(autouse=True)
def served_from_graphs(llm: LLM) -> Iterator[None]:
    """Errors run nothing eagerly and leave nothing behind."""
    before = llm.graph_report().replays
    yield
    assert_all_back(llm)
    assert llm.graph_report().eager_steps == {}
    assert llm.graph_report().replays >= before


def right(model: TinyModel, prompt: dict[str, list[int]]) -> list[int]:
    return model.greedy(tuple(prompt["prompt_token_ids"]), TOKENS)


def assert_refused_alone(
    llm: LLM, model: TinyModel, prompt: Any, message: str, params: SamplingParams = GREEDY
) -> None:
    """The error says so; others before, beside and after it in the same call and in the next are right."""
    earlier = llm.engine.add(GOOD[2], GREEDY)
    for _ in range(4):
        llm.engine.step()
    outputs = llm.generate([GOOD[0], prompt, GOOD[1]], [GREEDY, params, GREEDY])
    assert outputs[0].outputs[0].token_ids == right(model, GOOD[0])
    assert outputs[2].outputs[0].token_ids == right(model, GOOD[1])
    assert message in (outputs[1].error or "no error"), outputs[1]
    assert outputs[1].finished
    assert [completion.finish_reason for completion in outputs[1].outputs] == ["error"]
    assert outputs[1].outputs[0].token_ids == []
    while not earlier.finished:
        llm.engine.step()
    assert earlier.outputs[0].token_ids == right(model, GOOD[2])
    if isinstance(prompt, str | dict):  # one prompt, not a list of them: the error is raised
        with pytest.raises(RequestError) as raised:
            llm.generate(prompt, params)
        assert message in str(raised.value)
    [after] = llm.generate(GOOD[:1], GREEDY)
    assert after.outputs[0].token_ids == right(model, GOOD[0])


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "too-long": (prompts_of((64,))[0], "a prompt of 64 tokens and at least one more cannot fit, the model "),
    "far-too-long": (prompts_of((3000,))[0], "the model length is 64: raise max_model_len"),
    "no-tokens": ({"prompt_token_ids": []}, "the prompt is empty, at least one token is needed"),
    "no-text": ("", "the prompt is empty, at least one token is needed"),
    "above-the-vocabulary": (
        {"prompt_token_ids": [1, 131]},
        "token id 131 is outside the model's vocabulary of 131",
    ),
    "far-above": ({"prompt_token_ids": [2**40]}, "prompt_token_ids must be token ids"),
    "negative": ({"prompt_token_ids": [4, -1]}, "integers of at least 0"),
    "not-numbers": ({"prompt_token_ids": ["x"]}, "must be a list of integers"),
    "nested": ({"prompt_token_ids": [[1, 2]]}, "must be a list of integers"),
    "no-list": ({"prompt_token_ids": None}, "must be a list of integers"),
    "no-known-key": ({"text": "Hello"}, "a prompt must be a string or {'prompt_token_ids': [...]}"),
    "a-number": (17, "a prompt must be a string or"),
    "nothing": (None, "a prompt must be a string or"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt(llm: LLM, tiny_text: TinyModel, name: str) -> None:
    prompt, message = BAD_PROMPTS[name]
    assert_refused_alone(llm, tiny_text, prompt, message)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": "123"}, "list of integers"),
        ({"prompt_token_ids": [1.7]}, "list of integers"),
        ({"prompt_token_ids": ["12"]}, "list of integers"),
        ({"prompt": None}, "a prompt must be a string"),
        ({"prompt": 5}, "a prompt must be a string"),
    ],
    ids=["text", "fraction", "digits", "prompt-none", "prompt-number"],
)
def test_what_only_resembles_a_prompt(
    llm: LLM, tiny_text: TinyModel, prompt: dict[str, Any], message: str
) -> None:
    assert_refused_alone(llm, tiny_text, prompt, message)


BAD_PARAMS: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": -0.1}, "temperature must be a number of at least 0, not -0.1"),
    "temperature-nan": ({"temperature": float("nan")}, "temperature must be a number of at least 0"),
    "top_p-above": ({"top_p": 1.01}, "top_p must be above 0 and at most 1, not 1.01"),
    "top_p-zero": ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0"),
    "top_k": ({"top_k": -2}, "top_k must be"),
    "min_p": ({"min_p": 1.5}, "min_p must be from 0 to 1"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens must be an integer of at least 1"),
    "min_tokens": ({"min_tokens": 20, "max_tokens": 9}, "min_tokens (20) is above max_tokens (9)"),
    "n": ({"n": 0}, "n must be an integer of at least 1"),
    "repetition": ({"repetition_penalty": 0}, "repetition_penalty must be a number above 0"),
    "presence": ({"presence_penalty": 2.5}, "presence_penalty must be from -2 to 2"),
    "logprobs": ({"logprobs": -2}, "logprobs must be at least 0, -1 for all, or None"),
    "stop": ({"stop": [""]}, "a stop string must be a non-empty string"),
    "logit_bias": ({"logit_bias": {3: 101.0}}, "logit_bias of token 3 must be from -100 to 100"),
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_bad_parameters_while_others_are_served(llm: LLM, tiny_text: TinyModel, name: str) -> None:
    fields, message = BAD_PARAMS[name]
    output = llm.engine.add(GOOD[1], GREEDY)
    llm.engine.step()
    with pytest.raises(RequestError) as raised:
        llm.generate(GOOD[:1], SamplingParams(**fields))
    assert message in str(raised.value)
    while not output.finished:
        llm.engine.step()
    assert output.outputs[0].token_ids == right(tiny_text, GOOD[1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {200: 1.0}}, "logit_bias: token 200 is outside the vocabulary, which ends at 130"),
        (
            {"logit_bias": dict.fromkeys(range(600), 1.0)},
            "logit_bias has 600 tokens, and at most 512 are possible",
        ),
        ({"min_tokens": 2, "stop_token_ids": list(range(13))}, "at most 12 stop tokens"),
    ],
    ids=["bias-outside", "too-many-biases", "too-many-stops"],
)
def test_parameters_that_this_engine_cannot_serve(
    llm: LLM, tiny_text: TinyModel, fields: dict[str, Any], message: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, **fields)
    assert_refused_alone(llm, tiny_text, GOOD[0], message, params)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e39},
        {"temperature": 1e39, "min_tokens": 9, "top_p": 0.5},
        {"temperature": 1e-300},
        {"temperature": 0, "repetition_penalty": 1e39},
        {"temperature": 1.0, "repetition_penalty": 1e-300},
        {"top_p": 5e-324, "min_p": 5e-324, "top_k": 10**12},
        {"seed": -(2**63), "max_tokens": 2**62},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_extreme_numbers_hurt_nobody_else(llm: LLM, tiny_text: TinyModel, fields: dict[str, Any]) -> None:
    """Refused, or served with tokens of the vocabulary; never at the cost of others."""
    try:
        extreme = SamplingParams(**{"max_tokens": TOKENS, **fields})
    except RequestError:
        llm.generate(GOOD[:1], GREEDY)
        return
    outputs = llm.generate(GOOD, [GREEDY, extreme, GREEDY])
    assert outputs[0].outputs[0].token_ids == right(tiny_text, GOOD[0])
    assert outputs[2].outputs[0].token_ids == right(tiny_text, GOOD[2])
    assert outputs[1].error is None
    assert all(0 <= token < 131 for token in outputs[1].outputs[0].token_ids)
    assert outputs[1].outputs[0].finish_reason in ("length", "stop")


def test_what_min_tokens_cannot_hold_off_of_a_model_with_many_ends_is_refused(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = dataclasses.replace(llm.engine.core.loaded, eos_token_ids=frozenset(range(120, 127)))
    monkeypatch.setattr(llm.engine.core, "loaded", loaded)
    given: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": list(range(10))}
    with pytest.raises(RequestError, match="at most 9 stop tokens in addition to the 7 end-of-text tokens"):
        llm.generate("hello", SamplingParams(**given))
    assert llm.generate("hello", SamplingParams(**given, ignore_eos=True))[0].finished


def test_a_huge_min_tokens_does_not_kill_the_engine(tiny_text: TinyModel) -> None:
    llm = LLM(tiny_text.directory, **SMALL)
    try:
        huge = SamplingParams(temperature=0, max_tokens=None, min_tokens=2**40)
    except RequestError:
        return
    outputs = llm.generate([GOOD[0], GOOD[1]], [GREEDY, huge])
    assert outputs[0].outputs[0].token_ids == right(tiny_text, GOOD[0])
    assert outputs[1].finished
    llm.close()


def test_parameters_are_one_or_as_many_as_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling parameters were given for 1"):
        llm.generate(GOOD[:1], [GREEDY, GREEDY])


def test_text_for_a_model_without_a_tokenizer(shallow: TinyModel) -> None:
    with LLM(shallow.directory, **SMALL) as llm:
        assert_refused_alone(llm, shallow, "Hello", "no tokenizer: give {'prompt_token_ids': [...]}")
        stops = SamplingParams(temperature=0, max_tokens=TOKENS, stop="x")
        assert_refused_alone(llm, shallow, GOOD[0], "stop strings need a tokenizer", stops)
        assert llm.graph_report().eager_steps == {}


def test_a_prompt_that_the_cache_cannot_hold(shallow: TinyModel) -> None:
    with LLM(shallow.directory, **{**SMALL, "num_pages": 4}) as llm:
        message = "the KV cache holds 48 tokens in all: give it more memory or shorten the prompt"
        assert_refused_alone(llm, shallow, prompts_of((48,))[0], message)
        [longest] = llm.generate(prompts_of((47,)), GREEDY)
        assert len(longest.outputs[0].token_ids) == 1
        assert longest.outputs[0].finish_reason == "length"


def test_a_closed_engine_says_so(shallow: TinyModel) -> None:
    with LLM(shallow.directory, **SMALL) as llm:
        pass
    for call in (lambda: llm.generate(GOOD), lambda: llm.embed(GOOD), lambda: next(llm.stream(GOOD[0]))):
        with pytest.raises(RequestError, match="this LLM is closed"):
            call()
    llm.close()  # a second time does nothing


def fail_once(monkeypatch: pytest.MonkeyPatch, llm: LLM, error: BaseException, at: int = 2) -> None:
    """The device fails in the middle of the third step from now."""
    runner = llm.engine.core.runner
    run, calls = runner.run, iter(range(10_000))

    def run_or_fail(*args: Any, **kwargs: Any) -> torch.Tensor:
        if next(calls) == at:
            raise error
        return run(*args, **kwargs)

    monkeypatch.setattr(runner, "run", run_or_fail)


def test_a_failing_step_ends_its_requests_and_the_next_ones_are_served(
    shallow: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ahead in (0, 1):
        with LLM(shallow.directory, steps_ahead=ahead, **SMALL) as llm:
            fail_once(monkeypatch, llm, RuntimeError("the device fell off the bus"))
            outputs = llm.generate(GOOD[:2], GREEDY)
            assert any("fell off the bus" in (output.error or "") for output in outputs)
            assert all(output.finished for output in outputs)
            [output] = llm.generate(GOOD[:1], GREEDY)
            assert output.outputs[0].token_ids == right(shallow, GOOD[0])
            assert_all_back(llm)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("not ours")], ids=["interrupt", "bug"])
def test_after_an_interrupt_the_engine_goes_on(
    shallow: TinyModel, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Ctrl-C in a notebook: the call ends, nothing of it stays behind, the next one is served."""
    with LLM(shallow.directory, **SMALL) as llm:
        fail_once(monkeypatch, llm, error)
        with pytest.raises(type(error)):
            llm.generate(GOOD[:2], GREEDY)
        [output] = llm.generate(GOOD[:1], GREEDY)
        assert output.outputs[0].token_ids == right(shallow, GOOD[0])
        assert_all_back(llm)


def test_a_conversation_that_its_template_refuses_does_not_disturb_the_others(
    tiny_text: TinyModel, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_text.directory, directory)
    template = "{% for m in messages %}{% if m['role'] == 'pirate' %}{{ raise_exception('no pirates') }}"
    template += "{% endif %}{{ m['content'] }}<|turn|>{% endfor %}"
    config = {"eos_token": "<|end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    polite = [{"role": "user", "content": "Hello"}]
    with LLM(str(directory), **SMALL) as llm:
        [alone] = llm.chat(polite, GREEDY)
        with pytest.raises(RequestError, match="no pirates"):
            llm.chat([{"role": "pirate", "content": "Arr"}], GREEDY)
        outputs = llm.chat([polite, [{"role": "pirate", "content": "Arr"}], polite], GREEDY)
        assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids
        assert outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids
        assert "no pirates" in (outputs[1].error or "")
        half = [{"role": "user", "content": "half a character: \ud83d"}]
        with pytest.raises(RequestError, match="can't encode character"):
            llm.chat(half, GREEDY)
        [refused, served] = llm.chat([half, polite], GREEDY)
        assert "can't encode character" in (refused.error or "")
        assert served.outputs[0].token_ids == alone.outputs[0].token_ids
