"""What SamplingParams accepts, refuses and makes of it."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pydantic
import pytest
import torch

from ostinato.engine.parameters import sampling_params
from ostinato.engine.parameters.sampling_params import (
    BeamSearchParams,
    GuidedDecodingParams,
    RequestError,
    SamplingParams,
    StructuredOutputsParams,
)
from ostinato.graphs.errors import OstinatoError
from ostinato.server.wire.messages import Generate, decode_command, encode
from ostinato.text.errors import GrammarError


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("n", 0, "n must be an integer of at least 1, not 0"),
        ("n", 1.5, "n must be"),
        ("n", True, "n must be"),
        ("temperature", -0.1, "temperature must be a number of at least 0, not -0.1"),
        ("temperature", float("nan"), "temperature must be"),
        ("temperature", float("inf"), "temperature must be finite"),
        ("temperature", 1e39, "temperature must be finite and at most 3.40e+38, not 1e+39"),
        ("repetition_penalty", 1e300, "repetition_penalty must be finite and at most"),
        ("repetition_penalty", 1e-300, "repetition_penalty must be a number above 0"),
        ("temperature", "hot", "temperature must be"),
        ("top_p", 0.0, "top_p must be above 0 and at most 1, not 0.0"),
        ("top_p", 1.1, "top_p must be above 0 and at most 1, not 1.1"),
        ("top_k", -2, "top_k must be"),
        ("top_k", 1.0, "top_k must be"),
        ("min_p", -0.1, "min_p must be from 0 to 1"),
        ("min_p", 1.1, "min_p must be from 0 to 1"),
        ("presence_penalty", 2.1, "presence_penalty must be from -2 to 2"),
        ("frequency_penalty", -2.1, "frequency_penalty must be from -2 to 2"),
        ("repetition_penalty", 0.0, "repetition_penalty must be a number above 0"),
        ("logit_bias", {5: 101.0}, "logit_bias of token 5 must be from -100 to 100"),
        ("logit_bias", {-1: 1.0}, "a key of logit_bias must be a token id"),
        ("logit_bias", {"x": 1.0}, "a key of logit_bias must be a token id"),
        ("logit_bias", [1], "logit_bias must map token ids to numbers"),
        ("seed", 2**63, "seed must be a 64-bit integer"),
        ("seed", 0.5, "seed must be"),
        ("stop", "", "a stop string must be a non-empty string"),
        ("stop", ["a", 3], "a stop string must be a non-empty string"),
        ("stop_token_ids", [-1], "a stop token id must be a token id"),
        ("stop_token_ids", ["x"], "a stop token id must be a token id"),
        ("max_tokens", 0, "max_tokens must be an integer of at least 1"),
        ("min_tokens", -1, "min_tokens must be"),
        ("logprobs", -2, "logprobs must be at least 0, -1 for all, or None"),
        ("prompt_logprobs", 1.0, "prompt_logprobs must be at least 0"),
        ("stop", 5, "stop must be a list of strings"),
        ("stop_token_ids", 5, "stop_token_ids must be a list of token ids"),
        ("allowed_token_ids", [], "allowed_token_ids is empty"),
        ("allowed_token_ids", [1, -3], "an id of allowed_token_ids must be a token id"),
        ("allowed_token_ids", "12", "allowed_token_ids must be a list of token ids"),
        ("bad_words", "word", "bad_words must be a list of strings"),
        ("bad_words", ["a", ""], "bad_words must not contain an empty string"),
        ("bad_words", [[]], "bad_words must not contain an empty list"),
        ("bad_words", [3], "bad_words must be a list"),
        ("logits_processors", [3], "logits_processors must be functions"),
        ("truncate_prompt_tokens", 0, "truncate_prompt_tokens must be at least 1, or -1"),
        ("output_kind", 1, "output_kind must be a RequestOutputKind"),
        ("stream_interval", 0, "stream_interval must be at least 1"),
        ("structured_outputs", {"json": {}}, "structured_outputs must be StructuredOutputsParams"),
        ("extra_args", [1], "extra_args must be a dictionary"),
        ("ignore_eos", "yes", "ignore_eos must be True or False"),
        ("logprob_token_ids", ["x"], "an id of logprob_token_ids must be a token id"),
        ("best_of", 3, "best_of=3: extra completions are not generated and discarded: use n"),
        ("use_beam_search", True, "use LLM.beam_search"),
        ("thinking_token_budget", 10, "use max_tokens"),
        ("trace_decode_token_ids", [1], "use allowed_token_ids"),
    ],
)
def test_a_bad_value_is_named(field: str, value: Any, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert says in str(caught.value)


def test_contradictions_are_refused() -> None:
    with pytest.raises(RequestError, match=r"min_tokens \(9\) is above max_tokens \(8\)"):
        SamplingParams(min_tokens=9, max_tokens=8)
    with pytest.raises(RequestError, match="need detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=4)  # type: ignore[call-arg]


def test_errors_are_ours_and_value_errors() -> None:
    assert issubclass(RequestError, OstinatoError)
    assert issubclass(RequestError, ValueError)


def test_edge_values_are_accepted() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, max_tokens=None, seed=-(2**63), logprobs=0)
    SamplingParams(top_p=1e-300, presence_penalty=-2, frequency_penalty=2, min_tokens=16, max_tokens=16)


def test_stop_forms_are_one() -> None:
    assert SamplingParams(stop="a").stop == SamplingParams(stop=("a",)).stop == ["a"]
    assert SamplingParams().stop == SamplingParams(stop=[]).stop == []
    assert SamplingParams(stop_token_ids=(3, 4, 3)).stop_token_ids == [3, 4]
    assert SamplingParams(stop_token_ids=np.array([3, 4])).stop_token_ids == [3, 4]  # type: ignore[arg-type]
    assert SamplingParams(allowed_token_ids=torch.tensor([3])).allowed_token_ids == [3]  # type: ignore[arg-type]


def test_json_keys_of_a_bias_become_token_ids() -> None:
    assert SamplingParams(logit_bias={"12": 3}).logit_bias == {12: 3.0}  # type: ignore[dict-item]


def test_a_bias_does_not_change_behind_our_back() -> None:
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 50.0
    assert params.logit_bias == {1: 1.0}


def test_it_can_be_changed_copied_and_sent() -> None:
    params = SamplingParams(stop="a", logit_bias={1: 2.0})
    params.n = 2
    params.stop = "b"
    assert params.verified().stop == ["b"]
    with pytest.raises(RequestError):
        dataclasses.replace(params, n=0)
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(AttributeError, match="temprature"):
        params.temprature = 0.5  # type: ignore[attr-defined]


def test_a_value_that_became_wrong_is_refused_when_it_is_used() -> None:
    params = SamplingParams()
    params.top_p = 2.0
    with pytest.raises(RequestError, match="top_p must be above 0"):
        params.verified()


def test_positions_are_those_of_vllm() -> None:
    params = SamplingParams(2, 0.1, 0.2, 1.1, 0.7, 0.9, 40, 0.05, 7, ["x"], [3], True, 99, 4, 1, 2)
    assert (params.n, params.temperature, params.top_p, params.top_k) == (2, 0.7, 0.9, 40)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.prompt_logprobs) == (99, 4, 1, 2)
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(*[None] * 30)  # type: ignore[arg-type]


def test_a_clone_shares_nothing_but_functions() -> None:
    def same(ids: list[int], logits: Any) -> Any:
        return logits

    params = SamplingParams(stop=["a"], extra_args={"k": [1]}, logits_processors=[same])
    copied = params.clone()
    assert copied == params
    assert copied.stop is not None
    copied.stop.append("b")  # type: ignore[union-attr]
    assert copied.extra_args is not None
    copied.extra_args["k"].append(2)
    assert params.stop == ["a"]
    assert params.extra_args == {"k": [1]}
    assert copied.logits_processors == [same]


def test_names_and_values_of_vllm_that_ask_for_nothing_here() -> None:
    quiet = SamplingParams(
        n=2, best_of=2, use_beam_search=False, skip_clone=True, thinking_token_budget=-1, flat_logprobs=True
    )  # type: ignore[call-arg]
    assert quiet.n == 2
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(logprobs=True).logprobs == 1
    optional = SamplingParams.from_optional(n=None, temperature=None, top_p=0.5, max_tokens=None)
    assert optional == SamplingParams(top_p=0.5, max_tokens=None)


def test_the_seeds_of_several_completions_are_seeds() -> None:
    params = SamplingParams(n=3, seed=-2)
    assert [params.seeded(number).seed for number in range(3)] == [-2, 2**63 - 1, 0]
    assert params.seeded(1).n == 1
    assert SamplingParams(seed=2**63 - 1).seeded(1).seed == -(2**63)


class Person(pydantic.BaseModel):
    name: str


def test_shapes_under_both_names() -> None:
    for shape in (
        StructuredOutputsParams(json=Person),
        GuidedDecodingParams(json=Person.model_json_schema()),
    ):
        assert json.loads(shape.json)["required"] == ["name"]
    params = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["a", 'b"']))  # type: ignore[call-arg]
    assert params.structured_outputs is params.guided_decoding
    assert params.structured_outputs is not None
    assert params.structured_outputs.grammar == 'root ::= "a" | "b\\""'
    assert params.clone().structured_outputs == params.structured_outputs
    params.guided_decoding = None
    assert params.structured_outputs is None
    with pytest.raises(RequestError, match="older name"):
        SamplingParams(guided_decoding=shape, structured_outputs=shape)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="no backend 'outlines'"):
        GuidedDecodingParams(regex="a", backend="outlines")
    assert GuidedDecodingParams.from_optional(backend="xgrammar") is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"json": {}, "regex": "a"}, "json and regex"),
        ({"choice": ["a"], "grammar": "root ::= [a]"}, "choice and grammar"),
        ({"choice": []}, "choice must be a list of strings"),
        ({"choice": "ab"}, "choice must be a list of strings"),
        ({"json": 5}, "json must be a schema"),
        ({"json": ""}, "json must be a non-empty string"),
        ({"regex": "a", "whitespace_pattern": " "}, "whitespace_pattern is not supported"),
        ({"json": {}, "disable_any_whitespace": True}, "disable_any_whitespace is not supported"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(GrammarError, match=says):
        StructuredOutputsParams(**given)


def test_beams() -> None:
    beams = BeamSearchParams(4, 16)
    assert (beams.beam_width, beams.max_tokens, beams.length_penalty) == (4, 16, 1.0)
    with pytest.raises(RequestError, match="beam_width must be"):
        BeamSearchParams(beam_width=0, max_tokens=1)


def test_it_travels_to_the_engine_of_a_server() -> None:
    params = SamplingParams(
        stop=["x"],
        bad_words=[[1, 2], [3]],
        allowed_token_ids=[5],
        structured_outputs=StructuredOutputsParams(choice=["a", "b"]),
        extra_args={"k": 1},
    )
    command = decode_command(encode(Generate(1, [2], params)))
    assert isinstance(command, Generate)
    assert command.params == params


def test_what_passed_once_is_looked_at_again_when_it_has_changed() -> None:
    """Parameters that are the same as the last ones are not checked anew."""
    params = SamplingParams(temperature=0.5, logits_processors=[])
    for _ in range(2):
        assert params.verified() == params
    first, second = SamplingParams().verified(), SamplingParams().verified()
    for given in (first, second):
        assert given.verified() == SamplingParams()
    assert first.stop is not second.stop
    assert first.stop_token_ids is not second.stop_token_ids
    first.stop.append("")  # type: ignore[union-attr, attr-defined]
    with pytest.raises(RequestError, match="stop string"):
        first.verified()
    second.stop_token_ids.append(7)  # type: ignore[union-attr]
    assert second.verified().stop_token_ids == [7]
    third = SamplingParams(top_k=1)
    assert third.verified().top_k == 1
    third.top_k = True
    with pytest.raises(RequestError, match="top_k"):
        third.verified()


def test_what_stands_for_something_else_is_replaced_every_time() -> None:
    params = SamplingParams()
    params.seed, params.logprobs = -1, True
    for _ in range(3):
        made = params.verified()
        assert made.seed is None
        assert made.logprobs == 1
        assert made.logprobs is not True
    params = SamplingParams(bad_words=["a"], logit_bias={1: 2.0})
    params.verified()
    params.bad_words.append("")  # type: ignore[union-attr]
    with pytest.raises(RequestError, match="bad_words"):
        params.verified()


def test_what_another_thread_checks_meanwhile_excuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that can change inside takes the place of what was compared with, between two lines."""
    read = sampling_params._simple_values_of

    def interrupted(params: SamplingParams) -> Any:
        monkeypatch.setattr(sampling_params, "_simple_values_of", read)
        SamplingParams(bad_words=["a"]).verified()
        return read(params)

    params = SamplingParams()
    params.verified()
    params.top_k = -7
    monkeypatch.setattr(sampling_params, "_simple_values_of", interrupted)
    with pytest.raises(RequestError, match="top_k"):
        params.verified()


def test_kinds_of_sampling() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-9).is_greedy
    assert not SamplingParams().is_greedy
    assert not SamplingParams().has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties
