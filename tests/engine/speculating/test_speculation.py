"""With speculation every request gets what it gets without, token for token, whatever drafts are worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from engine.conftest import TinyModel, prompts_of
from engine.test_engine_greedy import assert_all_back
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.parameters.sampling_params import SamplingParams, StructuredOutputsParams

from .oracle import Oracle, key_of, oracle_llm

DRAFTS = 3
LENGTHS = (3, 21, 1, 40, 17)
SMALL: dict[str, Any] = {
    "max_model_len": 64,
    "max_running_requests": 4,
    "chunked_prefill_size": 16,
    "cuda_graph_prefill_tokens": [8, 16],
    "num_pages": 40,
    "enable_cudagraph_gc": True,
}
GREEDY = SamplingParams(temperature=0, max_tokens=23)
DRAWN = [SamplingParams(temperature=1.3, seed=seed, max_tokens=20) for seed in range(len(LENGTHS))]
PROMPTS = prompts_of(LENGTHS)
SETUPS = [
    pytest.param((mode, ahead), id=f"{mode}-{ahead}", marks=[] if is_often else [pytest.mark.slow])
    for mode, ahead, is_often in [
        ("full", 1, True),
        ("full", 0, False),
        ("full-and-piecewise", 0, True),
        ("full-and-piecewise", 1, False),
        ("full-decode-only", 1, False),
        ("piecewise", 0, False),
        ("piecewise", 1, True),
        ("none", 0, False),
        ("none", 1, True),
    ]
]


@pytest.fixture(scope="module")
def plain(tiny: TinyModel) -> Iterator[LLM]:
    """An engine without drafts."""
    with LLM(tiny.directory, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module", params=SETUPS)
def drafting(request: pytest.FixtureRequest, tiny: TinyModel) -> Iterator[tuple[LLM, Oracle]]:
    """One with, in every mode."""
    mode, ahead = request.param
    with oracle_llm(tiny.directory, DRAFTS, cuda_graph_mode=mode, steps_ahead=ahead, **SMALL) as found:
        yield found


@pytest.fixture(scope="module")
def ahead(tiny: TinyModel) -> Iterator[tuple[LLM, Oracle]]:
    """One that is a step ahead of its tokens."""
    with oracle_llm(tiny.directory, DRAFTS, cuda_graph_mode="full", steps_ahead=1, **SMALL) as found:
        yield found


Params = SamplingParams | Sequence[SamplingParams]


def told(outputs: Sequence[RequestOutput]) -> list[Any]:
    assert not [output.error for output in outputs if output.error]
    return [
        [
            (each.token_ids, each.finish_reason, each.stop_reason, rounded(each.logprobs))
            for each in output.outputs
        ]
        for output in outputs
    ]


def rounded(logprobs: Any) -> list[dict[int, float]]:
    return [{token: round(entry.logprob, 3) for token, entry in of.items()} for of in logprobs or ()]


def compare(plain: LLM, drafting: tuple[LLM, Oracle], params: Params, wrong: Sequence[int] = ()) -> None:
    """Both engines, with drafts that are right but at positions of which `wrong` are some in seven."""
    llm, oracle = drafting
    known = plain.generate(PROMPTS, params, use_tqdm=False)
    of_each = [params] * len(PROMPTS) if isinstance(params, SamplingParams) else params
    oracle.known.clear()
    for prompt, output, asked in zip(PROMPTS, known, of_each, strict=True):
        oracle.known[key_of(prompt["prompt_token_ids"], asked)] = output.outputs[0].token_ids
    oracle.wrong.copy_(torch.isin(torch.arange(oracle.wrong.numel()) % 7, torch.tensor(list(wrong))))
    assert told(llm.generate(PROMPTS, params, use_tqdm=False)) == told(known)
    assert_all_back(llm)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_tokens_are_those_without_drafts(plain: LLM, drafting: tuple[LLM, Oracle], params: Params) -> None:
    speculation = drafting[0].engine.core.runner.speculation
    assert speculation is not None
    before = speculation.counts.read()
    compare(plain, drafting, params, wrong=(0, 3, 5))
    found = speculation.counts.read()
    # Two right ones in a row at most: 0, 1 and 2 of 3 are accepted, and then all of them.
    assert found.accepted_per_position[2] == before.accepted_per_position[2]
    compare(plain, drafting, params)
    found = speculation.counts.read()
    accepted = [
        late - early
        for late, early in zip(found.accepted_per_position, before.accepted_per_position, strict=True)
    ]
    drafted = found.num_drafts - before.num_drafts
    assert drafted > accepted[0] > accepted[1] > accepted[2] > 0
    assert found.mean_acceptance_length > 1.5


def test_every_step_that_could_be_replayed_was(drafting: tuple[LLM, Oracle]) -> None:
    llm, _ = drafting
    mode = llm.engine.core.config.config.cuda_graph_mode
    speculation = llm.engine.core.runner.speculation
    assert speculation is not None
    report = llm.graph_report()
    expected = {"none": {"disabled"}, "full-decode-only": {"mixed-batch"}}.get(mode, set())
    assert set(report.eager_steps) == expected
    assert set(speculation.report().eager_steps) == ({"disabled"} if mode == "none" else set())
    assert not report.failures


def test_an_end_inside_what_a_step_brings(plain: LLM, ahead: tuple[LLM, Oracle]) -> None:
    """max_tokens, the model length, stop tokens: what comes behind is dropped."""
    greedy = {"temperature": 0.0}
    compare(plain, ahead, [SamplingParams(max_tokens=count, **greedy) for count in (1, 2, 3, 4, 6)])
    compare(plain, ahead, SamplingParams(max_tokens=None, **greedy))
    texts = [plain.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]
    for place in (4, 6):
        stops = [SamplingParams(max_tokens=23, stop_token_ids=[text[place]], **greedy) for text in texts]
        compare(plain, ahead, stops)
        least = [
            SamplingParams(max_tokens=23, stop_token_ids=[t[place]], min_tokens=9, **greedy) for t in texts
        ]
        compare(plain, ahead, least)


def test_others_beside_those_with_drafts(plain: LLM, ahead: tuple[LLM, Oracle]) -> None:
    """Whoever asks for more than plain sampling gets a token a step, and what it asked for."""
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.9, "seed": 3, "top_k": 20},
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.4},
        {"temperature": 0.7, "seed": 5},
    ]
    compare(plain, ahead, [SamplingParams(max_tokens=15, **each) for each in asked], wrong=(1, 4))
    others: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 5},
        {"temperature": 0.0, "bad_words": [[7], [3, 4]]},
        {"temperature": 0.0, "frequency_penalty": 0.5},
        {"temperature": 0.0, "logits_processors": [lambda ids, logits: logits]},
    ]
    compare(plain, ahead, [SamplingParams(max_tokens=15, **each) for each in others], wrong=(1, 4))
    report = ahead[0].speculation_report()
    assert report is not None
    assert set(report.single_requests) == {
        "logprobs",
        "penalties",
        "logits processors",
        "bad_words of several tokens",
    }


def test_filters_and_biases_have_drafts_verified(plain: LLM, drafting: tuple[LLM, Oracle]) -> None:
    """What people ask for most: their tokens are chosen at every place, with drafts accepted as for
    others."""
    asked: list[dict[str, Any]] = [
        {"temperature": 0.9, "seed": 3, "top_k": 20},
        {"temperature": 1.1, "seed": 4, "top_p": 0.8, "min_p": 0.01},
        {"temperature": 0.0, "logit_bias": {5: 4.0, 9: -100.0}},
        {"temperature": 1.5, "seed": 5, "allowed_token_ids": list(range(0, 131, 3)), "bad_words": [[6]]},
        {"temperature": 0.7, "seed": 5},
    ]
    report = drafting[0].speculation_report()
    assert report is not None
    before = report.drafts.num_accepted_tokens
    compare(plain, drafting, [SamplingParams(max_tokens=15, **each) for each in asked], wrong=(1, 4))
    least = {"min_tokens": 6, "stop_token_ids": [3, 20, 40, 60, 80, 100, 120]}
    mixed = [*({**each, **least} for each in asked[:4]), {"logprobs": 1, "seed": 1}]
    compare(plain, drafting, [SamplingParams(max_tokens=15, **each) for each in mixed])
    report = drafting[0].speculation_report()
    assert report is not None
    # Of 150 tokens at most, two thirds at least came as drafts.
    assert report.drafts.num_accepted_tokens - before > 60


def test_stop_strings_inside_what_a_step_brings(tiny_text: TinyModel) -> None:
    texts = ["Hello there", "a", "What is this"]
    options = {**SMALL, "max_running_requests": 3}
    with (
        LLM(tiny_text.directory, **options) as llm,
        oracle_llm(tiny_text.directory, DRAFTS, cuda_graph_mode="full", steps_ahead=1, **options) as (
            drafting,
            oracle,
        ),
    ):
        whole = llm.generate(texts, GREEDY, use_tqdm=False)
        for output in whole:
            known = key_of(output.prompt_token_ids or (), GREEDY)
            oracle.known[known] = output.outputs[0].token_ids
        for place in (3, 6):
            stops = [output.outputs[0].text[place : place + 2] for output in whole]
            for include in (False, True):
                params = [
                    SamplingParams(
                        temperature=0, max_tokens=23, stop=[stop], include_stop_str_in_output=include
                    )
                    for stop in stops
                ]
                expected = llm.generate(texts, params, use_tqdm=False)
                found = drafting.generate(texts, params, use_tqdm=False)
                assert told(found) == told(expected)
                assert [each.outputs[0].text for each in found] == [each.outputs[0].text for each in expected]
        grammar = StructuredOutputsParams(regex="(ab|cd)(12|34| 5){3,8}")
        mixed = [SamplingParams(temperature=0, max_tokens=20, structured_outputs=grammar), GREEDY, GREEDY]
        expected = llm.generate(texts, mixed, use_tqdm=False)
        assert told(drafting.generate(texts, mixed, use_tqdm=False)) == told(expected)
        streams = drafting.generate(texts, SamplingParams(temperature=0, max_tokens=9, n=2), use_tqdm=False)
        assert [output.outputs[1].token_ids for output in streams] == [
            output.outputs[0].token_ids[:9] for output in whole
        ]
        assert_all_back(drafting)
