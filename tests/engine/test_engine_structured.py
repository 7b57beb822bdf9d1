"""Answers that must look a certain way: every token inside the grammar, from graphs, beside free requests."""

import json
import re
from typing import Any
from unittest.mock import patch

import pytest

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import RequestError, SamplingParams
from ostinato.engine.scheduling.decode_batch import DecodeBatch
from ostinato.text.errors import GrammarError
from ostinato.text.structured import StructuredOutputs

from .conftest import STEPS_AHEAD, TinyModel

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SMALL: dict[str, Any] = {
    "max_model_len": 96,
    "max_running_requests": 6,
    "num_pages": 60,
    "cuda_graph_prefill_tokens": [16, 128],
    "enable_cudagraph_gc": True,
}


def params(wanted: StructuredOutputs, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 60, "structured_outputs": wanted, **more})


@pytest.mark.parametrize("ahead", STEPS_AHEAD)
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


@pytest.mark.parametrize("ahead", STEPS_AHEAD)
def test_preempted_requests_go_on_in_their_grammar(tiny_text: TinyModel, ahead: int) -> None:
    wanted = [params(StructuredOutputs(regex="[0-9]{40}"), seed=at) for at in range(4)]
    with LLM(tiny_text.directory, steps_ahead=ahead, **{**SMALL, "num_pages": 9}) as llm:
        outputs = llm.generate(["hello"] * 4, wanted)
        assert llm.engine.core.scheduler.num_preemptions > 0
        for output, one in zip(outputs, wanted, strict=True):
            assert re.fullmatch("[0-9]{40}", output.outputs[0].text)
            assert output.outputs[0].token_ids == llm.generate("hello", one)[0].outputs[0].token_ids


def test_what_cannot_be_followed_is_refused(tiny_text: TinyModel, tiny: TinyModel) -> None:
    with LLM(tiny_text.directory, **SMALL) as llm:
        with pytest.raises(RequestError, match="cannot be followed"):
            llm.generate("hello", params(StructuredOutputs(regex="[")))
        [good] = llm.generate("hello", params(StructuredOutputs(regex="[0-9]")))
        assert good.outputs[0].text.isdecimal()
    with LLM(tiny.directory, **SMALL) as llm, pytest.raises(RequestError, match="no tokenizer"):
        llm.generate({"prompt_token_ids": [1]}, params(StructuredOutputs(json_object=True)))
    with pytest.raises(GrammarError, match="need exactly one of"):
        StructuredOutputs()
    with pytest.raises(GrammarError, match="json_object and regex"):
        StructuredOutputs(json_object=True, regex="x")


@pytest.mark.parametrize("ahead", STEPS_AHEAD)
def test_parameters_that_leave_no_allowed_token_end_in_an_error(tiny_text: TinyModel, ahead: int) -> None:
    digits = {ord(digit): -100.0 for digit in "0123456789"}
    free = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with LLM(tiny_text.directory, steps_ahead=ahead, **SMALL) as llm:
        bad = params(StructuredOutputs(regex="[0-9]"), min_tokens=3)
        outputs = llm.generate(["hello", "hello"], [bad, free])
        assert outputs[0].error is not None
        assert "leave no token" in outputs[0].error
        assert outputs[1].error is None
        assert outputs[1].outputs[0].token_ids == llm.generate("hello", free)[0].outputs[0].token_ids
        biased = llm.generate("hello", params(StructuredOutputs(regex="[0-9]"), logit_bias=digits))
        assert biased[0].outputs[0].text.isdecimal(), "a bias of -100 is no ban"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_text_that_may_be_complete_goes_on_to_min_tokens(tiny_text: TinyModel, ignore_eos: bool) -> None:
    """The end of a text ends it where its grammar allows that, ignored or not; but not before."""
    longing = params(
        StructuredOutputs(regex="a{0,40}"), min_tokens=5, logit_bias={130: 100.0}, ignore_eos=ignore_eos
    )
    with LLM(tiny_text.directory, **SMALL) as llm:
        [found] = llm.generate("hello", longing)[0].outputs
    assert (found.text, len(found.token_ids), found.finish_reason) == ("aaaaa", 6, "stop")


# -- beside others, one step ahead -----------------------------------------------------------------

FREE = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
BOUND = params(StructuredOutputs(regex="[0-9]{40}"), seed=2, max_tokens=24)


def served_in_turns(llm: LLM, wanted: list[SamplingParams]) -> tuple[list[list[int]], list[int]]:
    """The tokens of each, and in which turn its last one came."""
    engine = llm.engine
    outputs = [engine.add("hello", one) for one in wanted]
    last, turn = [0] * len(wanted), 0
    while engine.has_work:
        turn += 1
        for output in engine.step():
            last[outputs.index(output)] = turn
    assert not any(output.error for output in outputs)
    return [output.outputs[0].token_ids for output in outputs], last


@pytest.mark.parametrize("ahead", STEPS_AHEAD)
@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_request_under_a_grammar_gets_a_token_in_every_step(
    tiny_text: TinyModel, mode: str, ahead: int
) -> None:
    """As many steps as a free one beside it, which does not notice."""
    with LLM(tiny_text.directory, cuda_graph_mode=mode, steps_ahead=ahead, **SMALL) as llm:
        [alone], [turns_alone] = served_in_turns(llm, [FREE])
        [bound_alone], _ = served_in_turns(llm, [BOUND])
        [free, bound], [turns_free, turns_bound] = served_in_turns(llm, [FREE, BOUND])
        assert free == alone
        assert bound == bound_alone
        assert len(bound) == len(free) == 24
        assert turns_free == turns_alone
        assert turns_bound == turns_free


def test_a_batch_with_a_grammar_in_it_is_steady(tiny_text: TinyModel) -> None:
    """Nothing is sent but masks, and those only where they are others than before."""
    with LLM(tiny_text.directory, cuda_graph_mode="full", steps_ahead=1, **SMALL) as llm:
        sampler, num_sent = llm.engine.core.sampler, 0
        assert sampler is not None
        fill = sampler._masks._buffers.fill

        def counted(*args: Any, **kwargs: Any) -> None:
            nonlocal num_sent
            num_sent += 1
            fill(*args, **kwargs)

        steady = []
        advance = DecodeBatch.advance
        with (
            patch.object(sampler._masks._buffers, "fill", counted),
            patch.object(DecodeBatch, "advance", lambda batch: (steady.append(1), advance(batch))[1]),
        ):
            served_in_turns(llm, [FREE, BOUND])
        assert len(steady) > 12
        assert num_sent == 1, "forty digits have one mask, until the last of them"


@pytest.mark.parametrize("ahead", STEPS_AHEAD)
def test_what_ends_a_request_under_a_grammar_ends_it_in_time(tiny_text: TinyModel, ahead: int) -> None:
    """The grammar, a stop string, a length, an abort: nobody gets a token of the step that was too much."""
    digits = StructuredOutputs(regex="[0-9]{12}")
    wanted = [
        params(digits, seed=3),
        params(digits, seed=4, max_tokens=5),
        params(digits, seed=5, stop=["0", "1", "2", "3", "4"]),
        params(digits, seed=6),
        FREE,
    ]
    with LLM(tiny_text.directory, steps_ahead=ahead, **SMALL) as llm:
        engine = llm.engine
        free = llm.generate("hello", FREE)[0].outputs[0].token_ids
        outputs = [engine.add("hello", one) for one in wanted]
        while len(outputs[3].outputs[0].token_ids) < 4:
            engine.step()
        engine.abort(outputs[3].request_id)
        so_far = outputs[3].outputs[0].text
        late = engine.add("hello", wanted[0])  # in the row that came free
        while engine.has_work:
            engine.step()
        engine.core.scheduler.check_integrity()
        ended, cut, stopped, aborted, beside = (output.outputs[0] for output in outputs)
        assert re.fullmatch("[0-9]{12}", ended.text)
        assert (ended.finish_reason, cut.finish_reason, stopped.finish_reason) == ("stop", "length", "stop")
        assert re.fullmatch("[0-9]{5}", cut.text)
        assert re.fullmatch("[5-9]*", stopped.text)
        assert aborted.text == so_far
        assert re.fullmatch("[0-9]+", so_far)
        assert late.outputs[0].token_ids == ended.token_ids
        assert beside.token_ids == free
