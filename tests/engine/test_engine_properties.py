"""Preemption x prefix hits x chunked prefill, drawn at random: no request ever notices the others."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.parameters.sampling_params import SamplingParams

from .conftest import TinyModel, prompts_of
from .expected_steps import Setup, computed_tokens, sampling_of, service_of
from .test_engine_greedy import assert_all_back

# Few pages, so that three requests of average length do not fit together.
SETUPS = {
    "chunks": Setup(pages=7),
    "small-chunks-ahead": Setup(pages=7, budget=7, token_rungs=(4, 7), ahead=1),
    "whole-full": Setup(mode="full", pages=8, chunked=False, token_rungs=(16, 64)),
    "no-cache-ahead": Setup(mode="full", pages=7, caching=False, ahead=1),
    "plenty-ahead": Setup(decode_rungs=(1, 3), running=3, pages=12, caching=False, ahead=1),
}
BEGINNINGS = [prompt["prompt_token_ids"] for prompt in prompts_of((48, 48), seed=1)]
ENDS = [prompt["prompt_token_ids"] for prompt in prompts_of((48, 48, 48), seed=2)]


@dataclass(frozen=True)
class Asked:
    """One request of a drawn workload."""

    beginning: int
    shared: int
    """Tokens of a beginning that others have too."""
    end: int
    own: int
    """Tokens of its own."""
    tokens: int
    seed: int | None
    """None: greedy."""
    wait: int
    """Steps before it arrives."""
    leave: int | None
    """Steps after which it is aborted."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """Its token ids."""
        return (*BEGINNINGS[self.beginning][: self.shared], *ENDS[self.end][: self.own])

    @property
    def params(self) -> SamplingParams:
        """How it samples."""
        if self.seed is None:
            return SamplingParams(temperature=0, max_tokens=self.tokens)
        return seeded(self.seed, self.tokens)


def seeded(seed: int, tokens: int) -> SamplingParams:
    """Params of those who draw."""
    return SamplingParams(temperature=1.1, top_k=30, seed=seed, max_tokens=tokens)


ASKED = st.builds(
    Asked,
    beginning=st.integers(0, 1),
    shared=st.sampled_from([0, 15, 16, 17, 32, 33]),
    end=st.integers(0, 2),
    own=st.integers(1, 12),
    tokens=st.integers(1, 18),
    seed=st.one_of(st.none(), st.none(), st.integers(0, 3)),
    wait=st.integers(0, 6),
    leave=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 12)),
)


OFTEN = ("small-chunks-ahead", "whole-full")
ENGINES = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in SETUPS]


@pytest.fixture(scope="module", params=ENGINES)
def engine_of(request: pytest.FixtureRequest, tiny: TinyModel) -> Iterator[tuple[LLM, LLM, Setup]]:
    """An engine under pressure, and one with room for everybody, asked for one request at a time."""
    setup = SETUPS[request.param]
    with LLM(tiny.directory, **setup.options) as crowded:
        with LLM(tiny.directory, **Setup(caching=False).options) as roomy:
            yield crowded, roomy, setup
    _sampled.cache_clear()


def serve(llm: LLM, workload: list[Asked]) -> tuple[list[RequestOutput], set[int], int]:
    """The outputs, which of them were aborted, and the turns of the engine."""
    engine = llm.engine
    outputs: list[RequestOutput] = []
    aborted: set[int] = set()
    waits = 0
    due: dict[int, int] = {}
    turn = 0
    while len(outputs) < len(workload) or engine.has_work:
        while len(outputs) < len(workload) and turn >= waits + workload[len(outputs)].wait:
            asked = workload[len(outputs)]
            waits += asked.wait
            if asked.leave is not None:
                due[len(outputs)] = turn + asked.leave
            outputs.append(engine.add({"prompt_token_ids": asked.prompt}, asked.params))
        for at in [at for at, when in due.items() if when <= turn]:
            del due[at]
            if engine.abort(outputs[at].request_id) is not None:
                aborted.add(at)
        engine.step()
        engine.core.scheduler.check_integrity()
        turn += 1
        assert turn < 2000, "somebody is never served"
    return outputs, aborted, turn


def check(engines: tuple[LLM, LLM, Setup], tiny: TinyModel, workload: list[Asked]) -> None:
    """Each request gets what it gets alone, from replays, and leaves nothing behind."""
    llm, roomy, setup = engines
    before, before_sampling = service_of(llm), sampling_of(llm)
    before_tokens = computed_tokens(llm)
    scheduler = llm.engine.core.scheduler
    before_preemptions = scheduler.num_preemptions
    outputs, aborted, turns = serve(llm, workload)
    for at, (asked, output) in enumerate(zip(workload, outputs, strict=True)):
        expected = alone(roomy, tiny, asked)
        found = output.outputs[0]
        assert output.error is None
        if at in aborted:
            assert found.finish_reason == "abort"
            assert found.token_ids == expected[: len(found.token_ids)]
        else:
            assert found.token_ids == expected
            assert found.finish_reason == "length"
            assert setup.caching or output.num_cached_tokens == 0
    assert_all_back(llm)
    # Nothing ran eagerly, every launched step was a replay, and every token was computed.
    service = service_of(llm).since(before)
    assert service.eager == {}
    assert service.steps <= turns
    assert sampling_of(llm).since(before_sampling).eager == {}
    if not aborted and scheduler.num_preemptions == before_preemptions:
        needed = sum(
            len(asked.prompt) - output.num_cached_tokens + asked.tokens - 1
            for asked, output in zip(workload, outputs, strict=True)
        )
        assert computed_tokens(llm) - before_tokens == needed


def alone(roomy: LLM, model: TinyModel, asked: Asked) -> list[int]:
    """What transformers says, or for a seed what an engine gives that serves nothing else meanwhile."""
    if asked.seed is None:
        return model.greedy(asked.prompt, asked.tokens)
    return list(_sampled(roomy, asked.prompt, asked.seed, asked.tokens))


@cache
def _sampled(roomy: LLM, prompt: tuple[int, ...], seed: int, tokens: int) -> tuple[int, ...]:
    [output] = roomy.generate([{"prompt_token_ids": prompt}], seeded(seed, tokens))
    assert output.num_cached_tokens == 0
    return tuple(output.outputs[0].token_ids)


WORKLOADS = st.lists(ASKED, min_size=2, max_size=8)
REPEATABLE = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@settings(REPEATABLE, max_examples=6)
@given(workload=WORKLOADS)
def test_each_request_gets_what_it_gets_alone(
    engine_of: tuple[LLM, LLM, Setup], tiny: TinyModel, workload: list[Asked]
) -> None:
    check(engine_of, tiny, workload)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(REPEATABLE, max_examples=150)
@given(workload=WORKLOADS)
def test_each_request_gets_what_it_gets_alone_many_times(
    engine_of: tuple[LLM, LLM, Setup], tiny: TinyModel, workload: list[Asked]
) -> None:
    check(engine_of, tiny, workload)


def test_the_workloads_do_preempt_hit_and_chunk(engine_of: tuple[LLM, LLM, Setup]) -> None:
    """These engines are small enough for what the drawn workloads are about."""
    llm, _, setup = engine_of
    scheduler = llm.engine.core.scheduler
    serve(llm, [Asked(0, 33, at % 3, 12, 18, None, 0, None) for at in range(8)])
    assert scheduler.num_preemptions > 0
    assert (scheduler.pages.statistics.hit_tokens > 0) == setup.caching
    if setup.chunked:
        assert setup.budget < 33 + 12
