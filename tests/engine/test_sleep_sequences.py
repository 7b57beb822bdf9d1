"""Any sequence of requests, sleeps, wakes and failures: no lost request, no wrong token, the right errors."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from memory.test_cpu import failing
from ostinato.engine.llm import LLM
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.sampling_params import SamplingParams
from ostinato.engine.sleeping.sleeper import EngineAsleepError
from ostinato.memory import TAGS, SaverMemoryError
from ostinato.models.weights import checkpoint_tensors

from .conftest import TinyModel, prompts_of
from .test_sleep import OPTIONS

TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)
PROMPTS = prompts_of((3, 21, 17, 40, 1))

some_tags = st.none() | st.lists(st.sampled_from(TAGS), min_size=1, unique=True)
prompts = st.sampled_from(PROMPTS)


class AnySequence(RuleBasedStateMachine):
    """An engine beside what it should be."""

    llm: LLM
    tiny: TinyModel
    weights: dict[str, torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.served: list[RequestOutput] = []
        self.away: set[str] = set()
        self.is_held = False
        self.is_lost = False
        self.will_be_lost = False
        """Whether the weights that are away have no backup."""

    @property
    def is_awake(self) -> bool:
        return not (self.away or self.is_held or self.is_lost)

    def wanted(self, output: RequestOutput) -> list[int]:
        return self.tiny.greedy(tuple(output.prompt_token_ids), TOKENS)

    @rule(prompt=prompts)
    def add(self, prompt: dict[str, list[int]]) -> None:
        self.served.append(self.llm.engine.add(prompt, GREEDY))

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.is_awake:
                self.llm.engine.step()
            else:
                with pytest.raises(EngineAsleepError):
                    self.llm.engine.step()

    @rule(prompt=prompts)
    def generate(self, prompt: dict[str, list[int]]) -> None:
        if self.is_awake:
            [output] = self.llm.generate(prompt, GREEDY)
            assert output.outputs[0].token_ids == self.wanted(output)
        else:
            with pytest.raises(EngineAsleepError):
                self.llm.generate(prompt, GREEDY)

    @precondition(lambda self: self.served)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        output = self.served.pop(data.draw(st.integers(0, len(self.served) - 1)))
        self.llm.engine.abort(output.request_id)
        assert output.finished

    @rule()
    def flush(self) -> None:
        self.llm.engine.core.scheduler.flush_prefix_cache()

    @rule(level=st.sampled_from((0, 1, 2)), mode=st.sampled_from(("abort", "wait", "keep")))
    def sleep(self, level: int, mode: str) -> None:
        was_awake = self.is_awake
        report = self.llm.sleep(level, mode)
        assert set(report.tags) == (set(TAGS) - self.away if level else set())
        self.will_be_lost |= level == 2 and "weights" in report.tags
        self.away |= set(report.tags)
        self.is_held = True
        if mode == "abort":
            assert all(output.finished for output in self.served)
            self.served = [output for output in self.served if output.outputs[0].finish_reason != "abort"]
        if mode == "wait" and was_awake:
            assert all(output.finished for output in self.served)

    @rule()
    def failing_sleep(self) -> None:
        if "weights" in self.away:
            return
        with failing("write", after=3), pytest.raises(SaverMemoryError):
            self.llm.sleep(1, "keep")

    @rule(tags=some_tags)
    def wake_up(self, tags: list[str] | None) -> None:
        asked = set(TAGS if tags is None else tags)
        asked |= {"graphs"} if "kv_cache" in asked else set()
        report = self.llm.wake_up(tags)
        assert set(report.tags) == asked & self.away
        if "weights" in report.tags and self.will_be_lost:
            self.is_lost, self.will_be_lost = True, False
        self.away -= asked
        self.is_held = self.is_held and bool(self.away)

    @rule(tags=some_tags, after=st.integers(0, 20))
    def failing_wake(self, tags: list[str] | None, after: int) -> None:
        asked = set(TAGS if tags is None else tags) & self.away
        if "weights" not in asked or after >= len(list(self.llm.engine.core.loaded.model.parameters())):
            return
        with failing("protect", after), pytest.raises(SaverMemoryError):
            self.llm.wake_up(tags)

    @precondition(lambda self: self.is_lost and "weights" not in self.away)
    @rule()
    def load(self) -> None:
        self.llm.update_weights(self.weights)
        self.is_lost = False

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        assert self.llm.is_sleeping() == (bool(self.away) or self.is_held)
        self.llm.engine.core.scheduler.check_integrity()
        for output in self.served:
            assert output.error is None
            got, wanted = output.outputs[0].token_ids, self.wanted(output)
            assert got == wanted if output.finished else got == wanted[: len(got)]

    def teardown(self) -> None:
        self.wake_up(None)
        if self.is_lost:
            self.load()
        while self.llm.engine.has_work:
            self.llm.engine.step()
        for output in self.served:
            assert output.outputs[0].token_ids == self.wanted(output), "a lost request"


@pytest.fixture(scope="module")
def machine(tiny: TinyModel) -> Iterator[type[AnySequence]]:
    with LLM(tiny.directory, **OPTIONS) as llm:
        views = checkpoint_tensors(llm.engine.core.loaded.model)
        weights = {name: view.clone() for name, view in views.items()}
        yield type("Machine", (AnySequence,), {"llm": llm, "tiny": tiny, "weights": weights})


def checked(machine: type[AnySequence], examples: int) -> None:
    asked = settings(max_examples=examples, stateful_step_count=20, deadline=None, derandomize=examples < 100)
    run_state_machine_as_test(machine, settings=asked)


def test_any_sequence(machine: type[AnySequence]) -> None:
    checked(machine, 12)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_sequences(machine: type[AnySequence]) -> None:
    checked(machine, 300)
