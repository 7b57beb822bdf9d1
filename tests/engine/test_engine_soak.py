"""Many requests of random kinds, lengths and fates at once; each gives what it gives alone."""

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ostinato.engine.llm import LLM
from ostinato.engine.outputs import CompletionOutput, Logprob, RequestOutput
from ostinato.engine.parameters.sampling_params import RequestError, SamplingParams

from .conftest import TinyModel, prompts_of
from .expected_steps import service_of
from .test_engine_greedy import SMALL, assert_all_back

OPTIONS = {**SMALL, "num_pages": 7}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.2, "seed": 2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.8, "seed": 3, "logprobs": 2, "min_p": 0.05},
]
LOGPROB_TOLERANCE = 1e-4
"""A row computed in another batch shape differs by about 6e-5 in float32."""


@dataclass
class Crowd:
    """What to ask, and what became of it."""

    prompts: list[dict[str, list[int]]]
    params: list[SamplingParams]
    outputs: list[RequestOutput] = dataclasses.field(default_factory=list)
    aborted: set[int] = dataclasses.field(default_factory=set)
    refused: int = 0

    def pairs(self, alone: list[RequestOutput]) -> Iterator[tuple[int, CompletionOutput, CompletionOutput]]:
        """Every completion in the crowd beside the same one alone."""
        for at, (output, single) in enumerate(zip(self.outputs, alone, strict=True)):
            for mixed, same in zip(output.outputs, single.outputs, strict=True):
                yield at, mixed, same


def random_crowd(count: int, **always: Any) -> Crowd:
    rng = random.Random(count)
    prompts = prompts_of([rng.randint(1, 45) for _ in range(count)], seed=count)
    for at in range(0, count, 3):  # common beginnings, for the prefix cache
        ids = prompts[at]["prompt_token_ids"]
        prompts[at] = {"prompt_token_ids": (prompts[0]["prompt_token_ids"][:20] + ids)[:45]}
    params = [
        SamplingParams(
            **{**rng.choice(KINDS), **always}, max_tokens=rng.randint(1, 18), n=rng.choice([1, 1, 1, 2])
        )
        for _ in range(count)
    ]
    return Crowd(prompts, params)


def serve(llm: LLM, crowd: Crowd) -> None:
    """Add, abort and refuse at random moments; every request must end and give everything back."""
    rng = random.Random(len(crowd.prompts) + 1)
    engine, outputs, count = llm.engine, crowd.outputs, len(crowd.prompts)
    steps = 0
    while len(outputs) < count or engine.has_work:
        if len(outputs) < count and rng.random() < 0.5:
            outputs.append(engine.add(crowd.prompts[len(outputs)], crowd.params[len(outputs)]))
            if rng.random() < 0.1:
                with pytest.raises(RequestError, match="cannot fit"):
                    engine.add(prompts_of((99,))[0], SamplingParams())
                crowd.refused += 1
        if outputs and rng.random() < 0.05:
            at = rng.randrange(len(outputs))
            if engine.abort(outputs[at].request_id) is not None:
                crowd.aborted.add(at)
        engine.step()
        steps += 1
        assert steps < 100 * count, "some request never ends"
    assert_all_back(llm)
    scheduler = engine.core.scheduler
    assert scheduler.num_preemptions > 0
    assert crowd.aborted
    assert crowd.refused
    assert scheduler.pages.statistics.hit_tokens > 0
    service = service_of(llm)
    assert service.eager == {}
    assert 0 < sum(service.replays.values()) <= steps
    for at, output in enumerate(outputs):
        assert output.finished
        assert output.error is None
        reasons = {completion.finish_reason for completion in output.outputs}
        assert reasons <= ({"length", "stop", "abort"} if at in crowd.aborted else {"length", "stop"})


def assert_close(mixed: list[dict[int, Logprob]] | None, alone: list[dict[int, Logprob]] | None) -> None:
    for here, there in zip(mixed or [], alone or [], strict=False):
        for token in here.keys() & there.keys():
            assert here[token].logprob == pytest.approx(there[token].logprob, abs=LOGPROB_TOLERANCE)


def soak(model: TinyModel, count: int, ahead: int) -> None:
    crowd = random_crowd(count)
    with LLM(model.directory, steps_ahead=ahead, **OPTIONS) as llm:
        serve(llm, crowd)
        alone = [
            llm.generate(prompt, one)[0] for prompt, one in zip(crowd.prompts, crowd.params, strict=True)
        ]
        for at, mixed, single in crowd.pairs(alone):
            if at in crowd.aborted:
                assert mixed.token_ids == single.token_ids[: len(mixed.token_ids)]
            else:
                assert mixed.token_ids == single.token_ids
                assert mixed.finish_reason == single.finish_reason
            assert_close(mixed.logprobs, single.logprobs)
        assert_all_back(llm)


def test_prompt_logprobs_survive_preemption(tiny: TinyModel) -> None:
    prompts = prompts_of((30, 28, 31, 45, 29), seed=8)
    params = SamplingParams(temperature=0, max_tokens=16, prompt_logprobs=1)
    with LLM(tiny.directory, **OPTIONS) as llm:
        together = llm.generate(prompts, params)
        assert llm.engine.core.scheduler.num_preemptions > 0
        for prompt, output in zip(prompts, together, strict=True):
            [alone] = llm.generate(prompt, params)
            assert output.prompt_logprobs is not None
            assert alone.prompt_logprobs is not None
            assert output.prompt_logprobs[0] is None
            for mixed, single in zip(output.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
                assert mixed is not None
                assert single is not None
                for token, entry in single.items():
                    assert mixed[token].logprob == pytest.approx(entry.logprob, abs=1e-4)


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_short_soak(tiny: TinyModel, ahead: int) -> None:
    soak(tiny, 40, ahead)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_long_soak(tiny: TinyModel, ahead: int) -> None:
    soak(tiny, 500, ahead)


def soak_bitwise(model: TinyModel, count: int, ahead: int, **options: Any) -> None:
    """The same, and every number equal: alone means an engine that has served nothing else."""
    crowd = random_crowd(count, logprobs=3)
    # The option makes its own ladder, of one size.
    small = {name: value for name, value in OPTIONS.items() if name != "cuda_graph_prefill_tokens"}
    with LLM(model.directory, steps_ahead=ahead, **small, **options) as llm:
        serve(llm, crowd)
    with LLM(model.directory, enable_prefix_caching=False, **small, **options) as llm:
        alone = [
            llm.generate(prompt, one)[0] for prompt, one in zip(crowd.prompts, crowd.params, strict=True)
        ]
        assert service_of(llm).eager == {}
    for at, mixed, single in crowd.pairs(alone):
        length = len(mixed.token_ids)
        assert mixed.token_ids == single.token_ids[:length]
        assert length == len(single.token_ids) or at in crowd.aborted
        assert mixed.logprobs is not None
        assert single.logprobs is not None
        assert mixed.logprobs == single.logprobs[:length]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_long_soak_bit_for_bit(tiny: TinyModel, ahead: int) -> None:
    soak_bitwise(tiny, 500, ahead, batch_invariant=True)


@pytest.mark.slow
def test_without_the_option_batches_do_change_bits(tiny: TinyModel) -> None:
    """Else the test above would prove nothing on this machine."""
    with pytest.raises(AssertionError, match="logprob"):
        soak_bitwise(tiny, 30, 1)
