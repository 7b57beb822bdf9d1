"""What SamplingParams accepts, refuses and makes of it."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from ostinato.engine.sampling_params import RequestError, SamplingParams
from ostinato.graphs.errors import OstinatoError


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("n", 0, "n must be an integer of at least 1, not 0"),
        ("n", 1.5, "n must be"),
        ("n", True, "n must be"),
        ("temperature", -0.1, "temperature must be a number of at least 0, not -0.1"),
        ("temperature", float("nan"), "temperature must be"),
        ("temperature", float("inf"), "temperature must be"),
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
        ("logit_bias", [1], "logit_bias maps token ids to numbers"),
        ("seed", 2**63, "seed must be a 64-bit integer"),
        ("seed", 0.5, "seed must be"),
        ("stop", "", "a stop string must be a text that is not empty"),
        ("stop", ["a", 3], "a stop string must be a text"),
        ("stop_token_ids", [-1], "a stop token id must be a token id"),
        ("stop_token_ids", ["x"], "a stop token id must be a token id"),
        ("max_tokens", 0, "max_tokens must be an integer of at least 1"),
        ("min_tokens", -1, "min_tokens must be"),
        ("logprobs", -1, "logprobs must be 0 to 20 or None"),
        ("logprobs", 21, "logprobs must be 0 to 20 or None"),
        ("prompt_logprobs", 21, "prompt_logprobs must be 0 to 20 or None"),
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
    assert SamplingParams(stop="a").stop == SamplingParams(stop=["a"]).stop == ("a",)
    assert SamplingParams().stop == SamplingParams(stop=[]).stop == ()
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


def test_json_keys_of_a_bias_become_token_ids() -> None:
    assert SamplingParams(logit_bias={"12": 3}).logit_bias == {12: 3.0}  # type: ignore[dict-item]


def test_a_bias_does_not_change_behind_our_back() -> None:
    bias = {1: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 50.0
    assert params.logit_bias == {1: 1.0}


def test_it_is_frozen_replaceable_and_travels() -> None:
    params = SamplingParams(stop="a", logit_bias={1: 2.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    assert dataclasses.replace(params, n=2).stop == ("a",)
    with pytest.raises(RequestError):
        dataclasses.replace(params, n=0)
    assert pickle.loads(pickle.dumps(params)) == params


def test_kinds_of_sampling() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=1e-9).is_greedy
    assert not SamplingParams().is_greedy
    assert not SamplingParams().has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties
