"""Prompts beside streams keep to a time between two tokens, by what steps have cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import LLM, SamplingParams
from ostinato.engine.config import EngineConfig
from ostinato.engine.scheduling.prompt_room import LEAST_TOKENS, PromptBound
from ostinato.engine.scheduling.scheduled_step import ScheduledStep
from ostinato.engine.scheduling.step_costs import StepCosts, StepSize
from ostinato.graphs.errors import ConfigError

from .conftest import TinyModel, prompts_of
from .lora_world import LoraWorld
from .test_engine_greedy import MODES, SMALL, assert_all_back
from .test_scheduler import Engine

SIZES = (4, 8, 16, 24, 32, 48, 64, 96)


@dataclass(frozen=True)
class TrueCosts:
    """What steps of a pretended device take."""

    step: float
    token: float
    pair: float
    context: float

    def of(self, size: StepSize) -> float:
        return self.step + self.token * size.tokens + self.pair * size.pairs + self.context * size.contexts


def costs_after(true: TrueCosts, sizes: list[StepSize]) -> StepCosts:
    costs = StepCosts(true.pair / true.token)
    for size in sizes:
        costs.note(size, true.of(size))
    return costs


COEFFICIENTS = st.builds(
    TrueCosts,
    step=st.floats(1e-4, 1e-2),
    token=st.floats(1e-6, 1e-3),
    pair=st.floats(1e-10, 1e-7),
    context=st.floats(0, 1e-7),
)


@settings(max_examples=40, deadline=None)
@given(true=COEFFICIENTS, draw=st.randoms(use_true_random=False))
def test_costs_are_learned_from_steps_of_many_sizes(true: TrueCosts, draw: Any) -> None:
    def drawn() -> StepSize:
        tokens = draw.randint(1, 4096)
        return StepSize(tokens, float(tokens * draw.randint(0, 30_000)), draw.randint(0, 500_000))

    sizes = [*(drawn() for _ in range(60)), StepSize(4096, 4096.0 * 2048, 0)]
    costs = costs_after(true, sizes)
    for size in (drawn() for _ in range(20)):
        found = costs.seconds(np.array(size.tokens), np.array(size.pairs), size.contexts)
        assert float(found) == pytest.approx(true.of(size), rel=0.05)


@settings(max_examples=40, deadline=None)
@given(true=COEFFICIENTS, known=st.integers(1, 64), asked=st.integers(65, 4096))
def test_what_was_never_measured_is_not_taken_for_cheap(true: TrueCosts, known: int, asked: int) -> None:
    costs = costs_after(true, [StepSize(known, 0.0, 0)] * 3)
    larger = StepSize(asked, asked * asked / 2, 0)
    found = costs.seconds(np.array(larger.tokens), np.array(larger.pairs), 0)
    assert float(found) >= true.of(larger) - true.pair * larger.pairs


def test_one_slow_step_does_not_count_for_long() -> None:
    true, size = TrueCosts(1e-3, 1e-5, 1e-9, 0), StepSize(512, 512.0 * 256, 0)
    costs = costs_after(true, [StepSize(32, 0.0, 8000), StepSize(1024, 1024.0 * 512, 0)] * 4)
    usual = true.of(size)
    costs.note(size, 5.0)  # the first of its size, and held up
    costs.note(size, true.of(size))
    assert float(costs.seconds(np.array(512), np.array(size.pairs), 0)) == pytest.approx(usual, rel=0.02)
    for seconds in (true.of(size),) * 8 + (5.0,):
        costs.note(size, seconds)
    assert float(costs.seconds(np.array(512), np.array(size.pairs), 0)) == pytest.approx(usual, rel=0.1)


def test_costs_that_change_are_learned_anew() -> None:
    size, other = StepSize(512, 512.0 * 256, 0), StepSize(64, 64.0 * 32, 0)
    costs = costs_after(TrueCosts(1e-3, 1e-5, 1e-9, 0), [size, other] * 50)
    slower = TrueCosts(1.5e-3, 1.5e-5, 1.5e-9, 0)
    for each in [size, other] * 100:
        costs.note(each, slower.of(each))
    found = costs.seconds(np.array(512), np.array(size.pairs), 0)
    assert float(found) == pytest.approx(slower.of(size), rel=0.02)


def test_what_prompts_cost_is_not_forgotten_while_none_come() -> None:
    true = TrueCosts(4e-3, 2e-5, 1e-9, 3e-8)
    costs = costs_after(true, [StepSize(32, 0.0, 8000), StepSize(1024, 1024.0 * 512, 8000)] * 8)
    draw = np.random.default_rng(0)
    for tokens, contexts in zip(draw.integers(1, 256, 20_000), draw.integers(0, 2**20, 20_000), strict=True):
        decode = StepSize(int(tokens), 0.0, int(contexts))
        costs.note(decode, true.of(decode) * draw.uniform(0.95, 1.05))
    asked = StepSize(1024, 1024.0 * 512, 8000)
    found = float(costs.seconds(np.array(asked.tokens), np.array(asked.pairs), asked.contexts))
    assert found == pytest.approx(true.of(asked), rel=0.1)


class TimedEngine(Engine):
    """A scheduler with a bound, on a device whose steps take what `TrueCosts` say."""

    def __init__(self, true: TrueCosts, seconds: float, **config: Any) -> None:
        most = config["max_batched_tokens"]
        self.true, self.seconds = true, seconds
        sizes = [*(size for size in SIZES if size < most), most]
        bound = PromptBound(seconds, StepCosts(true.pair / true.token), sizes)
        super().__init__(prompt_bound=bound, **config)
        self.bound = bound
        self.longest = 0.0

    def launch(self) -> ScheduledStep | None:
        step = super().launch()
        if step is not None:
            size = self.bound.size_of(step)
            self.bound.note(step, self.true.of(size))
            if step.prompt_tokens and step.samples[: step.num_requests - len(step.prompt_tokens)].any():
                self.check_time(step, size)
        return step

    def check_time(self, step: ScheduledStep, size: StepSize) -> None:
        """No longer than was asked for, or twice what its decodes take, or the least that prompts get; but
        for what is not learned yet, less than one size more."""
        num_decodes = step.num_requests - len(step.prompt_tokens)
        alone = self.true.of(StepSize(num_decodes, 0.0, size.contexts))
        smaller = max(at for at in (0, *self.bound.sizes.tolist()) if at < size.tokens)
        allowed = max(self.seconds, 2 * alone) + self.true.token * (size.tokens - smaller)
        taken = self.true.of(size)
        self.longest = max(self.longest, taken)
        if size.tokens > self.bound.least_size(num_decodes):
            assert taken <= allowed, "streams waited too long"


TIMES = st.builds(
    TrueCosts,
    step=st.floats(1e-3, 5e-3),
    token=st.floats(1e-5, 1e-3),
    pair=st.just(1e-8),
    context=st.floats(0, 1e-6),
)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_streams_wait_no_longer_than_asked_and_every_prompt_ends(data: st.DataObject) -> None:
    """Whoever comes when, at whatever costs: tokens as if alone, steps within the time, nobody starves."""
    true = data.draw(TIMES, label="costs")
    engine = TimedEngine(
        true,
        data.draw(st.floats(1e-4, 0.05), label="seconds"),
        num_pages=data.draw(st.sampled_from((14, 200)), label="pages"),
        page_size=16,
        max_running=data.draw(st.integers(1, 5), label="running"),
        max_batched_tokens=data.draw(st.sampled_from((24, 64, 96)), label="most"),
        max_model_len=120,
        lookahead=data.draw(st.integers(0, 1), label="ahead"),
    )
    for length, answer, turns in data.draw(
        st.lists(
            st.tuples(st.integers(1, 100), st.integers(0, 12), st.integers(0, 4)), min_size=1, max_size=8
        ),
        label="jobs",
    ):
        ids = [(length + at) % 12 for at in range(length)]
        if answer:
            engine.add(ids, SamplingParams(max_tokens=answer, ignore_eos=True))
        else:
            engine.embed(ids)
        for _ in range(turns):
            engine.turn()
    engine.drain()
    for request in engine.requests:
        if request.params is not None:
            engine.check(request)


def long_prompt_beside(engine: TimedEngine, streams: int) -> list[int]:
    """How much of a prompt of 96 tokens each step takes beside so many streams that do not end."""
    for at in range(streams):
        engine.add([at] * 3, SamplingParams(max_tokens=100, ignore_eos=True))
    for _ in range(4):
        engine.turn()
    prompt = engine.add([5] * 96, SamplingParams(max_tokens=2, ignore_eos=True))
    taken = []
    while prompt.num_output_tokens == 0:
        step = engine.launch()
        assert step is not None
        taken += [count for request, count in step.items if request is prompt]
        engine.complete()
    return [count for count in taken if count > 1]


def timed_engine(seconds: float) -> TimedEngine:
    config = {"max_running": 5, "max_batched_tokens": 96, "max_model_len": 128, "lookahead": 0}
    return TimedEngine(TrueCosts(1e-3, 1e-4, 1e-9, 1e-9), seconds, num_pages=100, page_size=16, **config)


def test_steps_are_as_large_as_the_time_allows_and_of_captured_sizes() -> None:
    # Steps of three tokens were seen: first what surely fits, then all that does.
    first, *others = long_prompt_beside(timed_engine(3.5e-3), 2)
    assert first == LEAST_TOKENS - 2 + 8  # a size of 24
    assert others == [24 - 2] * 3 + [96 - first - 3 * 22]


def test_nobody_comes_behind_a_prompt_that_is_cut() -> None:
    """At a long context few tokens fit; the beginning of another prompt would cost less."""
    true = TrueCosts(1e-3, 1e-5, 1e-6, 0.0)
    bound = PromptBound(4e-3, StepCosts(0.1), SIZES)
    for tokens in (4, 32, 96):
        size = StepSize(tokens, tokens * 50.0, 0)
        bound.costs.note(size, true.of(size))
    room = bound.room(1, 10, 95)
    assert 0 < room.at(100) < room.at(0)
    room.take(100, room.at(100))
    assert room.tokens == 0
    other = bound.room(1, 10, 95)
    other.at(0)
    other.take(0, 5)
    assert other.tokens > 0


def test_without_streams_a_step_is_full() -> None:
    assert long_prompt_beside(timed_engine(1e-4), 0) == [96]


def test_streams_that_only_wait_for_their_last_token_hold_nobody_up() -> None:
    engine = timed_engine(1e-4)
    for _ in range(3):
        engine.add([1] * 40, SamplingParams(max_tokens=1, ignore_eos=True))
    steps = []
    while engine.scheduler.has_work:
        step = engine.launch()
        steps += [] if step is None else [step.total_tokens]
        if engine.launched:
            engine.complete()
    assert steps == [96, 24]


def test_prompts_get_half_of_the_time_however_little_is_asked_for() -> None:
    engine = timed_engine(1e-6)
    taken = long_prompt_beside(engine, 4)
    assert sum(taken) == 96
    assert min(taken[:-1]) >= LEAST_TOKENS
    assert engine.longest <= 2 * engine.true.of(StepSize(32, 96 * 96.0, 200))


WIDE: dict[str, Any] = {
    **SMALL,
    "max_model_len": 128,
    "chunked_prefill_size": 64,
    "cuda_graph_prefill_tokens": [8, 16, 32, 64],
    "num_pages": 60,
}
PRETENDED = TrueCosts(1e-3, 1e-4, 1e-9, 0.0)


@contextmanager
def pretended_costs() -> Iterator[list[ScheduledStep]]:
    """Engines learn from a device whose steps take what `PRETENDED` says; the steps."""
    steps: list[ScheduledStep] = []

    def note(bound: PromptBound, step: ScheduledStep, seconds: float) -> None:
        assert seconds > 0
        steps.append(step)
        if not step.num_drafts:
            bound.costs.note(bound.size_of(step), PRETENDED.of(bound.size_of(step)))

    with patch.object(PromptBound, "note", note):
        yield steps


def served_beside_streams(
    llm: LLM, prompts: list[dict[str, list[int]]], **adapters: list[Any]
) -> list[list[int]]:
    """Two streams, and the other prompts beside them when they run; the tokens of all."""
    lora = adapters.get("lora", [None] * len(prompts))
    params = [SamplingParams(temperature=0, max_tokens=24 if at < 2 else 4) for at in range(len(prompts))]
    engine = llm.engine
    versions = [engine.version_of(asked) for asked in lora]
    given = list(zip(prompts, params, versions, strict=True))
    outputs = [engine.add(each, wanted, adapter=version) for each, wanted, version in given[:2]]
    while any(len(output.outputs[0].token_ids) < 3 for output in outputs):
        assert not any(output.finished for output in outputs), [output.error for output in outputs]
        engine.step()
    outputs += [engine.add(each, wanted, adapter=version) for each, wanted, version in given[2:]]
    while engine.has_work:
        engine.step()
    assert_all_back(llm)
    return [list(output.outputs[0].token_ids) for output in outputs]


def beside_streams(steps: list[ScheduledStep]) -> list[int]:
    """Tokens of the steps in which prompts ran beside streams."""
    return [
        step.total_tokens
        for step in steps
        if step.prompt_tokens and step.num_requests > len(step.prompt_tokens)
    ]


FAST = ("full", "full-and-piecewise")


@pytest.mark.parametrize(
    "mode", [mode if mode in FAST else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES]
)
def test_tokens_are_those_without_a_target_in_every_mode(tiny: TinyModel, mode: str) -> None:
    prompts = prompts_of((5, 9, 90, 70))
    with (
        pretended_costs() as steps,
        LLM(tiny.directory, cuda_graph_mode=mode, target_itl_ms=4.3, steps_ahead=1, **WIDE) as llm,
    ):
        found = served_beside_streams(llm, prompts)
        replayed = {row.num_tokens for row in llm.graph_report().graphs if row.replays}
    assert found == [
        tiny.greedy(tuple(prompt["prompt_token_ids"]), count)
        for prompt, count in zip(prompts, (24, 24, 4, 4), strict=True)
    ]
    sizes = beside_streams(steps)
    assert max(sizes) == 32
    assert sizes.count(32) >= 4
    assert (32 in replayed) == (mode not in ("none", "full-decode-only"))
    assert 64 not in replayed


def test_with_drafts_beside(tiny: TinyModel) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "disable_adaptive": True}
    prompts = prompts_of((5, 9, 90, 70))
    with (
        pretended_costs() as steps,
        LLM(tiny.directory, speculative_config=drafts, target_itl_ms=4.3, steps_ahead=1, **WIDE) as llm,
    ):
        found = served_beside_streams(llm, prompts)
    assert found[2] == tiny.greedy(tuple(prompts[2]["prompt_token_ids"]), 4)
    assert found[0] == tiny.greedy(tuple(prompts[0]["prompt_token_ids"]), 24)
    assert any(step.num_drafts for step in steps)
    assert max(beside_streams(steps)) == 32


@pytest.mark.slow
def test_with_adapters_beside(tmp_path: Path) -> None:
    world = LoraWorld.make(tmp_path)
    prompts, numbers = prompts_of((5, 9, 90, 70)), [0, None, 1, 0]
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "target_itl_ms": 4.3}
    with pretended_costs() as steps, LLM(world.base.directory, **WIDE, **options) as llm:
        found = served_beside_streams(llm, prompts, lora=[world.asked(number) for number in numbers])
    for at, count in enumerate((24, 24, 4, 4)):
        assert found[at] == world.expected(numbers[at], prompts[at], count)
    assert max(beside_streams(steps)) == 32


def test_the_engine_learns_what_its_own_steps_take(tiny: TinyModel) -> None:
    """On a CPU a step takes what its launch does; a target that nothing reaches leaves prompts their half."""
    with LLM(tiny.directory, target_itl_ms=0.001, **WIDE) as llm:
        bound = llm.engine.core.prompt_bound
        assert bound is not None
        assert not bound.costs.is_known
        served_beside_streams(llm, prompts_of((5, 9, 90, 70)))
        assert sum(bound.costs.coefficients) > 1e-5
        assert bound.seconds_for(2, 20) == pytest.approx(2 * bound.costs.at_least(2, 20))
        assert bound.seconds_for(2, 20) > 1e-5


def test_options() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"target_itl_ms": 0}, "above 0"),
        ({"target_itl_ms": -3.0}, "above 0"),
        ({"target_itl_ms": float("nan")}, "above 0"),
        ({"target_itl_ms": True}, "must be of type"),
        ({"target_itl_ms": 10, "enable_chunked_prefill": False}, "needs enable_chunked_prefill"),
        ({"target_itl_ms": 10, "batch_invariant": True}, "exclude each other"),
    ]
    for options, why in refused:
        with pytest.raises(ConfigError, match=why):
            EngineConfig(**options)
    assert EngineConfig(target_itl_ms=10).target_itl_ms == 10
