"""Drafts that are right or wrong at random x preemption x prefix hits x chunks x aborts: nobody notices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.conftest import TinyModel
from engine.expected_steps import Setup
from engine.test_engine_greedy import assert_all_back
from engine.test_engine_properties import BEGINNINGS, ENDS, REPEATABLE, serve
from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams

from .oracle import Oracle, key_of, oracle_llm

SETUPS = {
    "ahead": (3, Setup(mode="full", pages=8, budget=7, token_rungs=(4, 7), ahead=1)),
    "pieces-ahead": (2, Setup(mode="piecewise", pages=8, budget=16, ahead=1)),
    "eager": (5, Setup(mode="none", pages=9, caching=False, ahead=1)),
    "behind": (4, Setup(pages=8)),
}
OFTEN = ("ahead",)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.1, "seed": 4},
    "filtered": {"temperature": 1.1, "seed": 2, "top_k": 30},
    "penalised": {"temperature": 0.0, "presence_penalty": 0.7},
}


@dataclass(frozen=True)
class Asked:
    """One request of a drawn workload, as `serve` takes it."""

    beginning: int
    shared: int
    end: int
    own: int
    tokens: int
    kind: str
    wait: int
    leave: int | None

    @property
    def prompt(self) -> tuple[int, ...]:
        """Its token ids."""
        return (*BEGINNINGS[self.beginning][: self.shared], *ENDS[self.end][: self.own])

    @property
    def params(self) -> SamplingParams:
        """How it samples."""
        return SamplingParams(max_tokens=self.tokens, **KINDS[self.kind])


WORKLOADS = st.lists(
    st.builds(
        Asked,
        beginning=st.integers(0, 1),
        shared=st.sampled_from([0, 15, 16, 17, 32, 33]),
        end=st.integers(0, 2),
        own=st.integers(1, 12),
        tokens=st.integers(1, 18),
        kind=st.sampled_from(["greedy", "greedy", "drawn", *KINDS]),
        wait=st.integers(0, 6),
        leave=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 12)),
    ),
    min_size=2,
    max_size=8,
)
WRONG = st.sets(st.integers(0, 66), max_size=30)


@pytest.fixture(
    scope="module",
    params=[name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in SETUPS],
)
def engines(request: pytest.FixtureRequest, tiny: TinyModel) -> Iterator[tuple[LLM, Oracle, LLM]]:
    """An engine with drafts under pressure, and one without, asked for one request at a time."""
    num_drafts, setup = SETUPS[request.param]
    with oracle_llm(tiny.directory, num_drafts, **setup.options) as (crowded, oracle):
        with LLM(tiny.directory, **Setup(caching=False).options) as roomy:
            yield crowded, oracle, roomy
    _alone.cache_clear()


@cache
def _alone(roomy: LLM, prompt: tuple[int, ...], kind: str) -> list[int]:
    params = SamplingParams(max_tokens=18, **KINDS[kind])
    [output] = roomy.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return output.outputs[0].token_ids


def check(engines: tuple[LLM, Oracle, LLM], workload: list[Asked], wrong: set[int]) -> None:
    """Each request gets what it gets alone."""
    llm, oracle, roomy = engines
    texts = [_alone(roomy, asked.prompt, asked.kind) for asked in workload]
    oracle.known = {
        key_of(asked.prompt, asked.params): text for asked, text in zip(workload, texts, strict=True)
    }
    oracle.wrong.zero_()
    oracle.wrong[[at for at in wrong if at < len(oracle.wrong)]] = True
    outputs, aborted, _ = serve(llm, workload)  # type: ignore[arg-type]
    for at, (asked, output, text) in enumerate(zip(workload, outputs, texts, strict=True)):
        found = output.outputs[0]
        assert output.error is None
        if at in aborted:
            assert found.token_ids == text[: len(found.token_ids)]
        else:
            assert found.token_ids == text[: asked.tokens]
            assert found.finish_reason == "length"
    assert_all_back(llm)


@settings(REPEATABLE, max_examples=6)
@given(workload=WORKLOADS, wrong=WRONG)
def test_each_request_gets_what_it_gets_without_drafts(
    engines: tuple[LLM, Oracle, LLM], workload: list[Asked], wrong: set[int]
) -> None:
    check(engines, workload, wrong)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(REPEATABLE, max_examples=80)
@given(workload=WORKLOADS, wrong=WRONG)
def test_each_request_gets_what_it_gets_without_drafts_many_times(
    engines: tuple[LLM, Oracle, LLM], workload: list[Asked], wrong: set[int]
) -> None:
    check(engines, workload, wrong)


def test_prompts_come_while_nobody_knows_how_long_the_others_are(engines: tuple[LLM, Oracle, LLM]) -> None:
    """Each arrival is in a step behind one whose drafts are all wrong, or some of them."""
    workload = [Asked(0, 3 * at, at % 3, 5, 16, "greedy", 3 if at else 0, None) for at in range(4)]
    for wrong in (set(range(67)), set(range(0, 67, 2)), set(range(1, 67, 3))):
        check(engines, workload, wrong)


def test_the_workloads_do_preempt_and_hit(engines: tuple[LLM, Oracle, LLM]) -> None:
    llm, _, _ = engines
    scheduler = llm.engine.core.scheduler
    serve(llm, [Asked(0, 33, at % 3, 12, 18, "greedy", 0, None) for at in range(8)])  # type: ignore[list-item]
    assert scheduler.num_preemptions > 0
    assert (scheduler.pages.statistics.hit_tokens > 0) == llm.engine.core.config.config.enable_prefix_caching
