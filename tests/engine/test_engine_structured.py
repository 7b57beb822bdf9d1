"""Answers that must look a certain way: every token inside the grammar, from graphs, beside free requests."""

import json
import re
from typing import Any

import pytest

from ostinato.engine.llm import LLM
from ostinato.engine.sampling_params import RequestError, SamplingParams
from ostinato.text.errors import GrammarError
from ostinato.text.structured import StructuredOutputs

from .conftest import TinyModel

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SMALL: dict[str, Any] = {"max_model_len": 96, "max_running_requests": 6, "num_pages": 60}


def params(wanted: StructuredOutputs, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 60, "structured_outputs": wanted, **more})


@pytest.mark.parametrize("ahead", [0, 1])
def test_schemas_and_expressions_are_kept_beside_free_requests(tiny_text: TinyModel, ahead: int) -> None:
    wanted = [
        params(StructuredOutputs(json=SCHEMA), seed=1),
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        params(StructuredOutputs(regex="[0-9]{3}-[a-f]{2}"), seed=2),
        params(StructuredOutputs(regex="(yes|no)"), temperature=0),
        params(StructuredOutputs(json=SCHEMA), seed=3, logprobs=2),
        params(StructuredOutputs(grammar='root ::= "ab" [c-e]+ "."'), seed=4, max_tokens=50),
    ]
    with LLM(tiny_text.directory, steps_ahead=ahead, **SMALL) as llm:
        outputs = [output.outputs[0] for output in llm.generate(["hello"] * len(wanted), wanted)]
        free = llm.generate("hello", wanted[1])[0].outputs[0]
        reports = llm.graph_report(), llm.sampling_report()
    for output in (outputs[0], outputs[4]):
        answer = json.loads(output.text)
        assert answer["a"] in ("x", "y")
        assert isinstance(answer["b"], bool)
        assert output.finish_reason == "stop"
    assert outputs[1].token_ids == free.token_ids, "a free request is not disturbed"
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", outputs[2].text)
    assert outputs[3].text in ("yes", "no")
    assert re.fullmatch(r"ab[c-e]+\.?", outputs[5].text)
    for report in reports:
        assert report is not None
        assert report.eager_steps == {}
        assert report.replays > 0


def test_a_row_is_free_again_after_a_grammar(tiny_text: TinyModel) -> None:
    free = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)
    with LLM(tiny_text.directory, **{**SMALL, "max_running_requests": 1}) as llm:
        before = llm.generate("hello", free)[0].outputs[0].token_ids
        llm.generate("hello", params(StructuredOutputs(regex="[0-9]{4}")))
        assert llm.generate("hello", free)[0].outputs[0].token_ids == before


def test_preempted_requests_go_on_in_their_grammar(tiny_text: TinyModel) -> None:
    wanted = [params(StructuredOutputs(regex="[0-9]{40}"), seed=at) for at in range(4)]
    with LLM(tiny_text.directory, **{**SMALL, "num_pages": 9}) as llm:
        outputs = llm.generate(["hello"] * 4, wanted)
        assert llm.engine.core.scheduler.num_preemptions > 0
    for output in outputs:
        assert re.fullmatch("[0-9]{40}", output.outputs[0].text)


def test_what_cannot_be_followed_is_refused(tiny_text: TinyModel, tiny: TinyModel) -> None:
    with LLM(tiny_text.directory, **SMALL) as llm:
        with pytest.raises(RequestError, match="cannot be followed"):
            llm.generate("hello", params(StructuredOutputs(regex="[")))
        [good] = llm.generate("hello", params(StructuredOutputs(regex="[0-9]")))
        assert good.outputs[0].text.isdecimal()
    with LLM(tiny.directory, **SMALL) as llm, pytest.raises(RequestError, match="no tokenizer"):
        llm.generate({"prompt_token_ids": [1]}, params(StructuredOutputs(json_object=True)))
    with pytest.raises(GrammarError, match="want one of"):
        StructuredOutputs()
    with pytest.raises(GrammarError, match="json_object and regex"):
        StructuredOutputs(json_object=True, regex="x")


def test_parameters_that_leave_no_allowed_token_end_in_an_error(tiny_text: TinyModel) -> None:
    digits = {ord(digit): -100.0 for digit in "0123456789"}
    with LLM(tiny_text.directory, **SMALL) as llm:
        bad = params(StructuredOutputs(regex="[0-9]"), min_tokens=3)
        outputs = llm.generate(["hello", "hello"], [bad, SamplingParams(temperature=0, max_tokens=3)])
        assert outputs[0].error is not None
        assert "leave no token" in outputs[0].error
        assert outputs[1].error is None
        biased = llm.generate("hello", params(StructuredOutputs(regex="[0-9]"), logit_bias=digits))
        assert biased[0].outputs[0].text.isdecimal(), "a bias of -100 is no ban"
