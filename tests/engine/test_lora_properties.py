"""Adapters loaded, replaced, removed and asked for at random: nobody ever gets another's."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato import LLM, LoRARequest, RequestError, SamplingParams

from .conftest import prompts_of
from .greedy_reference import assert_greedy
from .lora_world import LoraWorld

NAMES = ("a", "b", "c")
PROMPTS = prompts_of([3, 20, 35, 33], seed=6)
PROMPTS += [{"prompt_token_ids": [*PROMPTS[2]["prompt_token_ids"][:32], 7]}]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> LoraWorld:
    return LoraWorld.make(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module", params=[0, 1], ids=["at once", "a step ahead"])
def llm(world: LoraWorld, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(
        world.base.directory,
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=2,
        max_lora_rank=8,
        max_running_requests=3,
        num_pages=10,
        chunked_prefill_size=16,
        cuda_graph_bs=(3,),
        cuda_graph_prefill_tokens=(16,),
        steps_ahead=request.param,
    ) as llm:
        yield llm


@dataclass
class Driver:
    """Does what is drawn, and knows what must come of it."""

    llm: LLM
    world: LoraWorld
    loaded: dict[str, int] = field(default_factory=dict)
    """Contents by name."""
    asked: dict[str, tuple[Any, int | None, str | None]] = field(default_factory=dict)
    """Prompt, contents at admission and name of every request."""
    found: dict[str, Any] = field(default_factory=dict)
    count: int = 0

    def load(self, name: str, contents: int, inplace: bool) -> None:
        asked = LoRARequest(name, 1 + NAMES.index(name), self.world.path(contents), inplace)
        known = self.loaded.get(name)
        if known is not None and known != contents and not inplace:
            with pytest.raises(RequestError, match="is taken by"):
                self.llm.add_lora(asked)
            return
        assert self.llm.add_lora(asked) == (inplace or known is None)
        self.loaded[name] = contents

    def remove(self, name: str) -> None:
        contents, lora_id = self.loaded.get(name), 1 + NAMES.index(name)
        try:
            assert self.llm.remove_lora(lora_id) == (contents is not None)
            self.loaded.pop(name, None)
        except RequestError:
            assert any(used == name for _, _, used in self.asked.values())

    def ask(self, prompt: int, name: str | None, tokens: int) -> None:
        self.count += 1
        params = SamplingParams(temperature=0, max_tokens=tokens)
        adapter = None if name is None else LoRARequest(name, 1 + NAMES.index(name))
        if name is not None and name not in self.loaded:
            with pytest.raises(RequestError, match="is not loaded"):
                self.llm.llm_engine.add_request(
                    str(self.count), PROMPTS[prompt], params, lora_request=adapter
                )
            return
        self.llm.llm_engine.add_request(str(self.count), PROMPTS[prompt], params, lora_request=adapter)
        contents = None if name is None else self.loaded[name]
        self.asked[str(self.count)] = PROMPTS[prompt], contents, name

    def abort(self, which: int) -> None:
        unfinished = [name for name in self.asked if name not in self.found]
        if unfinished:
            name = unfinished[which % len(unfinished)]
            self.llm.llm_engine.abort_request(name)
            del self.asked[name]

    def step(self, times: int) -> None:
        for _ in range(times):
            for output in self.llm.llm_engine.step():
                if output.finished:
                    self.found[output.request_id] = output

    def finish(self) -> None:
        while self.llm.llm_engine.has_unfinished_requests():
            self.step(1)
            self.llm.engine.core.scheduler.check_integrity()
        self.llm.engine.core.settle()
        assert self.found.keys() == self.asked.keys()
        for request_id, (prompt, contents, _) in self.asked.items():
            model = self.world.base if contents is None else self.world.adapted[contents]
            assert_greedy(
                model.reference, prompt["prompt_token_ids"], self.found[request_id].outputs[0].token_ids
            )
        adapters = self.llm.engine.adapters
        for name in list(self.loaded):
            assert self.llm.remove_lora(1 + NAMES.index(name))
        assert adapters.slots.tenants == [None, None]
        assert adapters.listed() == []
        pages = self.llm.engine.core.scheduler.pages
        assert pages.num_free == pages.num_usable


ACTIONS = st.one_of(
    st.tuples(st.just("load"), st.sampled_from(NAMES), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("remove"), st.sampled_from(NAMES)),
    st.tuples(st.just("ask"), st.integers(0, 4), st.sampled_from([None, *NAMES]), st.integers(1, 14)),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("step"), st.integers(1, 6)),
)
BEGINNINGS = [("load", "a", 0, False), ("load", "b", 1, False), ("load", "c", 3, False)]


def run(llm: LLM, world: LoraWorld, actions: list[Any]) -> None:
    driver = Driver(llm, world)
    for name, *arguments in actions:
        getattr(driver, name)(*arguments)
    driver.finish()


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(st.lists(ACTIONS, min_size=6, max_size=24))
def test_each_answer_is_of_the_version_at_its_admission(
    llm: LLM, world: LoraWorld, actions: list[Any]
) -> None:
    run(llm, world, [*BEGINNINGS, *actions])


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ACTIONS, min_size=6, max_size=40))
def test_the_same_for_long(llm: LLM, world: LoraWorld, actions: list[Any]) -> None:
    run(llm, world, [*BEGINNINGS, *actions])


def test_a_step_that_fails_takes_no_adapter_along(llm: LLM, world: LoraWorld, monkeypatch: Any) -> None:
    """What a slot should have got is written by the next step."""
    driver = Driver(llm, world)
    driver.load("a", 1, False)
    stacks = llm.engine.core.runner.adapters
    assert stacks is not None
    real, calls = stacks.write, []

    def fails_once(slot: int, adapter: Any) -> None:
        calls.append(slot)
        if len(calls) == 1:
            raise RuntimeError("no memory")
        real(slot, adapter)

    monkeypatch.setattr(stacks, "write", fails_once)
    params = SamplingParams(temperature=0, max_tokens=4)
    outputs = llm.generate(PROMPTS[:1], params, lora_request=LoRARequest("a", 1))
    assert "no memory" in (outputs[0].error or "")
    driver.ask(0, "a", 4)
    driver.finish()
    assert len(calls) == 2


def test_files_may_go_when_they_are_read(llm: LLM, world: LoraWorld, tmp_path: Path) -> None:
    place = tmp_path / "gone"
    shutil.copytree(world.path(1), place)
    llm.add_lora(LoRARequest("a", 1, str(place)))
    shutil.rmtree(place)
    driver = Driver(llm, world, loaded={"a": 1})
    driver.ask(1, "a", 6)
    driver.finish()
