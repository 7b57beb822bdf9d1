"""`logprobs_mode="processed_logprobs"`: log-probabilities under the distribution that tokens are drawn from.

The distribution is made here from transformers' logits, step by step and in float64.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato import LLM, SamplingParams
from ostinato.engine.outputs import RequestOutput
from ostinato.graphs import ConfigError

from .conftest import TinyModel, prompts_of

TOKENS = 6
OPTIONS = {
    "max_model_len": 64,
    "max_running_requests": 20,
    "cuda_graph_bs": (1, 20),
    "max_logprobs": -1,
    "progress": False,
}
CASES: dict[str, dict[str, Any]] = {
    "the model's own": {},
    "greedy": {"temperature": 0.0},
    "cooler": {"temperature": 0.6},
    "hotter": {"temperature": 1.7},
    "top-k": {"top_k": 5},
    "top-p": {"temperature": 1.4, "top_p": 0.8},
    "min-p": {"min_p": 0.05, "temperature": 2.0},
    "all filters": {"temperature": 1.5, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "penalties and heat": {"repetition_penalty": 2.0, "frequency_penalty": 1.5, "temperature": 0.8},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 3.0, "frequency_penalty": 2.0},
    "bias": {"logit_bias": {3: 6.0, 7: -50.0}, "temperature": 0.9},
    "allowed": {"allowed_token_ids": list(range(10, 40)), "top_k": 12},
    "no end yet": {"min_tokens": TOKENS, "stop_token_ids": list(range(50, 62))},
    "a function": {"logits_processors": [lambda ids, logits: logits * 0.5], "temperature": 1.2},
}


@pytest.fixture(scope="module")
def llm(tiny: TinyModel) -> Iterator[LLM]:
    with LLM(tiny.directory, logprobs_mode="processed_logprobs", **OPTIONS) as llm:
        yield llm


def asking(case: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": TOKENS, "seed": 4, "ignore_eos": True, "logprobs": 3, **case, **more}
    )


def drawn_from(logits: Tensor, case: dict[str, Any], prompt: list[int], so_far: list[int]) -> Tensor:
    """Log-probabilities of the next token."""
    logits = logits.double().clone()
    if "logits_processors" in case:
        logits *= 0.5
    for token, bias in case.get("logit_bias", {}).items():
        logits[token] += bias
    logits[case.get("stop_token_ids", [])] = -torch.inf
    seen, factor = sorted({*prompt, *so_far}), case.get("repetition_penalty", 1.0)
    logits[seen] = torch.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
    for token in set(so_far):
        logits[token] -= case.get("presence_penalty", 0.0)
        logits[token] -= case.get("frequency_penalty", 0.0) * so_far.count(token)
    if "allowed_token_ids" in case:
        rest = torch.ones_like(logits, dtype=torch.bool)
        rest[case["allowed_token_ids"]] = False
        logits[rest] = -torch.inf
    if case.get("temperature", 1.0) == 0:
        return logits.log_softmax(-1)
    logits /= case.get("temperature", 1.0)
    if "top_k" in case:
        logits[logits < logits.topk(case["top_k"]).values[-1]] = -torch.inf
    chances, order = logits.softmax(-1).sort(descending=True)
    logits[order[chances.cumsum(0) - chances >= case.get("top_p", 1.0) + 1e-12]] = -torch.inf
    chances = logits.softmax(-1)
    logits[chances < case.get("min_p", 0.0) * chances.max()] = -torch.inf
    return logits.log_softmax(-1)


def check(
    tiny: TinyModel, output: RequestOutput, case: dict[str, Any], num_told: int, near: float = 2e-5
) -> None:
    assert output.error is None
    [completion], prompt = output.outputs, list(output.prompt_token_ids)
    assert len(completion.token_ids) == TOKENS
    logits = tiny.reference(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 :]
    for at, (token, told) in enumerate(zip(completion.token_ids, completion.logprobs or [], strict=True)):
        expected = drawn_from(logits[at], case, prompt, list(completion.token_ids[:at]))
        assert num_told <= len(told) <= num_told + 1
        assert told[token].logprob > -torch.inf, "it was drawn"
        ranks = [int((expected > expected[token] + side).sum()) + 1 for side in (near, -near)]
        assert ranks[0] <= told[token].rank <= ranks[1]
        for other, found in told.items():
            assert found.logprob == pytest.approx(float(expected[other]), abs=near)
        likeliest = sorted((found.logprob for found in told.values()), reverse=True)[:num_told]
        assert likeliest == pytest.approx(expected.topk(num_told).values.tolist(), abs=near)


@pytest.mark.parametrize("name", ["cooler", "all filters", "penalties and heat", "a function"])
def test_alone(llm: LLM, tiny: TinyModel, name: str) -> None:
    [output] = llm.generate(prompts_of((7,)), asking(CASES[name]))
    check(tiny, output, CASES[name], 3)


def test_in_one_batch(llm: LLM, tiny: TinyModel) -> None:
    prompts = prompts_of([5 + at for at in range(len(CASES))])
    params = [asking(case, logprobs=at % 4) for at, case in enumerate(CASES.values())]
    outputs = llm.generate([*prompts, *prompts[:2]], [*params, *[asking({}, logprobs=None)] * 2])
    for at, (output, case) in enumerate(zip(outputs, CASES.values(), strict=False)):
        check(tiny, output, case, at % 4)
    assert all(output.outputs[0].logprobs is None for output in outputs[-2:])


def test_of_the_whole_vocabulary(llm: LLM, tiny: TinyModel) -> None:
    cases = [CASES[name] for name in ("the model's own", "all filters", "penalties and heat", "a function")]
    outputs = llm.generate(prompts_of([7] * len(cases)), [asking(case, logprobs=-1) for case in cases])
    for output, case in zip(outputs, cases, strict=True):
        check(tiny, output, case, 131)
        for told in output.outputs[0].logprobs or []:
            sum_of_all = sum(torch.tensor(found.logprob).exp() for found in told.values())
            assert float(sum_of_all) == pytest.approx(1.0, abs=1e-4)


def test_the_tokens_are_the_same_and_the_models_own_is_told_by_graphs(llm: LLM, tiny: TinyModel) -> None:
    prompts, params = prompts_of([7] * len(CASES)), [asking(case) for case in CASES.values()]
    outputs = llm.generate(prompts, params)
    with LLM(tiny.directory, **OPTIONS) as raw:
        others = raw.generate(prompts, params)
    for name, one, other in zip(CASES, outputs, others, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        is_same = one.outputs[0].logprobs == other.outputs[0].logprobs
        assert is_same == (name in ("the model's own", "greedy"))


def test_modes_that_there_are_not(tiny: TinyModel) -> None:
    with pytest.raises(ConfigError, match="unknown logprobs_mode 'raw_logits': use raw_logprobs or"):
        LLM(tiny.directory, logprobs_mode="raw_logits", **OPTIONS)
