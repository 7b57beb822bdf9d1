"""Many requests of random kinds, lengths and fates at once; each gives what it gives alone."""

import random

import pytest

from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.sampling_params import RequestError, SamplingParams

from .conftest import TinyModel, prompts_of
from .test_engine_greedy import SMALL, assert_all_back

OPTIONS = {**SMALL, "num_pages": 7}
KINDS = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.2, "seed": 2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 0.8, "seed": 3, "logprobs": 2, "min_p": 0.05},
]


def soak(model: TinyModel, count: int, ahead: int) -> None:
    rng = random.Random(count)
    prompts = prompts_of([rng.randint(1, 45) for _ in range(count)], seed=count)
    for at in range(0, count, 3):  # common beginnings, for the prefix cache
        ids = prompts[at]["prompt_token_ids"]
        prompts[at] = {"prompt_token_ids": (prompts[0]["prompt_token_ids"][:20] + ids)[:45]}
    params = [
        SamplingParams(**rng.choice(KINDS), max_tokens=rng.randint(1, 18), n=rng.choice([1, 1, 1, 2]))
        for _ in range(count)
    ]
    with LLM(model.directory, steps_ahead=ahead, **OPTIONS) as llm:
        engine = llm.engine
        outputs: list[RequestOutput] = []
        aborted: set[int] = set()
        refused = 0
        while len(outputs) < count or engine.has_work:
            if len(outputs) < count and rng.random() < 0.5:
                outputs.append(engine.add(prompts[len(outputs)], params[len(outputs)]))
                if rng.random() < 0.1:
                    with pytest.raises(RequestError, match="cannot fit"):
                        engine.add(prompts_of((99,))[0], SamplingParams())
                    refused += 1
            if outputs and rng.random() < 0.05:
                at = rng.randrange(len(outputs))
                if engine.abort(outputs[at].request_id) is not None:
                    aborted.add(at)
            engine.step()
        assert_all_back(llm)
        scheduler = engine.core.scheduler
        assert scheduler.num_preemptions > 0
        assert aborted
        assert refused
        assert scheduler.pages.statistics.hit_tokens > 0
        assert llm.graph_report().eager_steps == {}
        for at, output in enumerate(outputs):
            assert output.finished
            assert output.error is None
            alone = llm.generate(prompts[at], params[at])[0]
            for mixed, single in zip(output.outputs, alone.outputs, strict=True):
                if at in aborted:
                    assert mixed.token_ids == single.token_ids[: len(mixed.token_ids)]
                else:
                    assert mixed.token_ids == single.token_ids
                    assert mixed.finish_reason == single.finish_reason
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


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_short_soak(tiny: TinyModel, ahead: int) -> None:
    soak(tiny, 60, ahead)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_long_soak(tiny: TinyModel, ahead: int) -> None:
    soak(tiny, 500, ahead)
