"""Any sequence of requests, sleeps, wakes, pauses, updates and failures: no lost request, no wrong token, the
right errors. What is right is what engines say that nobody disturbs, one for each set of weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from memory.test_cpu import failing
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.engine.scheduling.request import Request
from ostinato.engine.sleeping.sleeper import EngineAsleepError
from ostinato.memory import TAGS, SaverMemoryError
from ostinato.models.errors import WeightsError
from ostinato.models.weights import checkpoint_tensors

from .conftest import TinyModel, prompts_of
from .test_sleep import OPTIONS

TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
PROMPTS = prompts_of((3, 21, 17, 40, 1))
MODES = st.sampled_from(("abort", "wait", "keep"))

some_tags = st.none() | st.lists(st.sampled_from(TAGS), min_size=1, unique=True)
prompts = st.sampled_from(PROMPTS)


def given_as_an_iterator(new: "Weights") -> Iterator[tuple[str, torch.Tensor]]:
    return iter(new.items())


def disturbance(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, Any]]:
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


disturbances = st.one_of(
    disturbance("abort", at=st.integers(0, 9)),
    disturbance("flush", running=st.booleans()),
    disturbance("sleep", level=st.sampled_from((0, 1, 2)), mode=MODES),
    disturbance("sleep", level=st.just(1), mode=st.just("keep")),
    disturbance("pause", mode=MODES, clear_cache=st.booleans()),
    disturbance("resume"),
    disturbance("failing_sleep"),
    disturbance("wake_up", tags=some_tags),
    disturbance("failing_wake", tags=some_tags, after=st.integers(0, 20)),
    disturbance("update", weights=st.integers(0, 1), given=st.sampled_from((dict, given_as_an_iterator))),
    disturbance(
        "failing_update",
        weights=st.integers(0, 1),
        at=st.integers(0, 8),
        how=st.sampled_from(("name", "shape", "iterator")),
    ),
)
"""In one rule: of many rules every example leaves out some, and requests have to be there in all of them."""
Weights = dict[str, torch.Tensor]


class BrokenOff(Exception):
    """What a trainer's iterator raises in its middle."""


class Undisturbed:
    """An engine that only generates, and its weights."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._said: dict[tuple[tuple[int, ...], int], list[int]] = {}
        views = checkpoint_tensors(llm.engine.core.loaded.model)
        self.weights = {name: view.clone() for name, view in views.items()}

    def says(self, prompt: list[int], count: int) -> list[int]:
        """What comes behind a prompt."""
        key = tuple(prompt), count
        if key not in self._said:
            params = SamplingParams(temperature=0, max_tokens=count)
            [output] = self._llm.generate({"prompt_token_ids": prompt}, params)
            self._said[key] = output.outputs[0].token_ids
        return self._said[key]


@dataclass
class Served:
    """A request and what is known of its tokens."""

    output: RequestOutput
    weights: int
    """Which it is computed with."""
    fixed: list[int] = field(default_factory=list)
    """Tokens of earlier weights."""
    is_mixed: bool = False
    """Whether its KV is partly of earlier weights: what it says is nobody else's to say."""

    @property
    def tokens(self) -> list[int]:
        return self.output.outputs[0].token_ids

    def computed_with(self, weights: int, *, is_mixed: bool) -> None:
        if not self.output.finished:
            self.fixed, self.weights, self.is_mixed = list(self.tokens), weights, is_mixed


class AnySequence(RuleBasedStateMachine):
    """An engine beside what it should be."""

    llm: LLM
    undisturbed: list[Undisturbed]

    def __init__(self) -> None:
        super().__init__()
        self.served: list[Served] = []
        self.away: set[str] = set()
        self.is_held = False
        self.is_paused = False
        self.is_lost = False
        self.will_be_lost = False
        """Whether the weights that are away have no backup."""
        self.weights = 0
        self.llm.update_weights(self.undisturbed[0].weights, version="first")
        self.version = "first"

    @property
    def is_asleep(self) -> bool:
        return bool(self.away or self.is_held or self.is_lost)

    def wanted(self, one: Served) -> list[int]:
        prompt = list(one.output.prompt_token_ids) + one.fixed
        return one.fixed + self.undisturbed[one.weights].says(prompt, TOKENS - len(one.fixed))

    def all_are_computed_again(self) -> None:
        for one in self.served:
            if one.is_mixed:
                one.computed_with(one.weights, is_mixed=False)

    @rule(given=st.lists(prompts, max_size=2), count=st.integers(0, 5), what=disturbances)
    def serve_and_be_disturbed(
        self, given: list[dict[str, list[int]]], count: int, what: tuple[str, dict[str, Any]]
    ) -> None:
        for prompt in given:
            self.served.append(Served(self.llm.engine.add(prompt, GREEDY), self.weights))
        self.steps(count)
        name, arguments = what
        getattr(self, name)(**arguments)

    @rule(given=st.lists(prompts, min_size=1, max_size=3))
    def serve_all(self, given: list[dict[str, list[int]]]) -> None:
        self.wake_up(None)
        self.resume()
        if self.is_lost:
            self.update(self.weights, dict)
        for prompt in given:
            self.generate(prompt)
        while self.llm.engine.has_work:
            self.llm.engine.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.is_asleep:
                with pytest.raises(EngineAsleepError):
                    self.llm.engine.step()
            else:
                self.llm.engine.step()

    def generate(self, prompt: dict[str, list[int]]) -> None:
        if self.is_asleep or self.is_paused:
            with pytest.raises(EngineAsleepError):
                self.llm.generate(prompt, GREEDY)
        else:
            [output] = self.llm.generate(prompt, GREEDY)
            assert output.outputs[0].token_ids == self.wanted(Served(output, self.weights))

    def abort(self, at: int) -> None:
        if at >= len(self.served):
            return
        one = self.served.pop(at)
        self.llm.engine.abort(one.output.request_id)
        assert one.output.finished

    def flush(self, running: bool) -> None:
        assert self.llm.reset_prefix_cache(reset_running_requests=running)

    def sleep(self, level: int, mode: str) -> None:
        was_asleep = self.is_asleep
        report = self.llm.sleep(level, mode)
        assert set(report.tags) == (set(TAGS) - self.away if level else set())
        self.will_be_lost |= level == 2 and "weights" in report.tags
        self.away |= set(report.tags)
        self.is_held = True
        self.is_paused = self.is_paused and mode != "wait"
        self.ended(mode, was_asleep)
        if level:
            self.all_are_computed_again()

    def pause(self, mode: str, clear_cache: bool) -> None:
        self.llm.pause_generation(mode=mode, clear_cache=clear_cache)
        self.is_paused = True
        self.ended(mode, self.is_asleep)
        if clear_cache:
            self.all_are_computed_again()

    def ended(self, mode: str, was_asleep: bool) -> None:
        if mode == "abort":
            assert all(one.output.finished for one in self.served)
            self.served = [one for one in self.served if one.output.outputs[0].finish_reason != "abort"]
        if mode == "wait" and not was_asleep:
            assert all(one.output.finished for one in self.served)

    def resume(self) -> None:
        self.llm.resume_generation()
        self.is_paused = self.is_held = False

    def failing_sleep(self) -> None:
        if "weights" in self.away:
            return
        with failing("write", after=3), pytest.raises(SaverMemoryError):
            self.llm.sleep(1, "keep")
        self.all_are_computed_again()

    def wake_up(self, tags: list[str] | None) -> None:
        asked = set(TAGS if tags is None else tags)
        asked |= {"graphs"} if "kv_cache" in asked else set()
        report = self.llm.wake_up(tags)
        assert set(report.tags) == asked & self.away
        if "weights" in report.tags and self.will_be_lost:
            self.is_lost, self.will_be_lost = True, False
        self.away -= asked
        self.is_held = self.is_held and bool(self.away)
        self.is_paused = self.is_paused and self.llm.is_sleeping()

    def failing_wake(self, tags: list[str] | None, after: int) -> None:
        asked = set(TAGS if tags is None else tags) & self.away
        if "weights" not in asked or after >= len(list(self.llm.engine.core.loaded.model.parameters())):
            return
        with failing("protect", after), pytest.raises(SaverMemoryError):
            self.llm.wake_up(tags)

    def update(self, weights: int, given: Callable[[Weights], Any]) -> None:
        new = given(self.undisturbed[weights].weights)
        if "weights" in self.away:
            with pytest.raises(EngineAsleepError):
                self.llm.update_weights(new)
            return
        report = self.llm.update_weights(new)
        assert report.missing == 0
        running: list[Request] = self.llm.engine.core.scheduler.running
        with_kv = {request.request_id for request in running}
        is_other = weights != self.weights or self.is_lost
        self.weights, self.is_lost, self.version = weights, False, report.version
        for one in self.served:
            if is_other:
                one.computed_with(weights, is_mixed=one.is_mixed or one.output.request_id in with_kv)

    def failing_update(self, weights: int, at: int, how: str) -> None:
        pairs = list(self.undisturbed[weights].weights.items())
        name, tensor = pairs[at]

        def breaking_off() -> Iterator[tuple[str, torch.Tensor]]:
            yield from pairs[:at]
            raise BrokenOff

        bad: dict[str, Any] = {
            "name": [*pairs[:at], (f"{name}.not", tensor)],
            "shape": [*pairs[:at], (name, torch.zeros(3, 3))],
            "iterator": breaking_off(),
        }
        expected = EngineAsleepError if "weights" in self.away else (WeightsError, BrokenOff)
        with pytest.raises(expected):
            self.llm.update_weights(bad[how])

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        assert self.llm.is_sleeping() == (bool(self.away) or self.is_held)
        assert self.llm.is_paused() == (self.is_paused or self.llm.is_sleeping())
        assert self.llm.weight_version == self.version
        self.llm.engine.core.scheduler.check_integrity()
        for one in self.served:
            assert one.output.error is None
            got = one.tokens
            if one.is_mixed:
                assert got[: len(one.fixed)] == one.fixed
                assert len(got) == TOKENS or not one.output.finished
            else:
                wanted = self.wanted(one)
                assert got == wanted if one.output.finished else got == wanted[: len(got)]

    def teardown(self) -> None:
        self.serve_all([])
        for one in self.served:
            assert one.output.finished, "a lost request"
        self.all_is_as_it_should_be()


@pytest.fixture(scope="module")
def machine(tiny: TinyModel) -> Iterator[type[AnySequence]]:
    plain = {**OPTIONS, "enable_sleep_mode": False, "hostile_wake": False, "cuda_graph_mode": "none"}
    with (
        LLM(tiny.directory, **OPTIONS) as llm,
        LLM(tiny.directory, **plain) as one,
        LLM(tiny.directory, load_format="dummy", seed=7, **plain) as other,
    ):
        undisturbed = [Undisturbed(one), Undisturbed(other)]
        yield type("Machine", (AnySequence,), {"llm": llm, "undisturbed": undisturbed})


def checked(machine: type[AnySequence], examples: int) -> None:
    asked = settings(max_examples=examples, stateful_step_count=20, deadline=None, derandomize=examples < 100)
    run_state_machine_as_test(machine, settings=asked)


def test_any_sequence(machine: type[AnySequence]) -> None:
    checked(machine, 8)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_sequences(machine: type[AnySequence]) -> None:
    checked(machine, 150)
