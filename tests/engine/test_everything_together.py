"""Drafts x adapters x graphs x cached prefixes x steps ahead x windows x few pages, under requests of every
kind, aborts, sleeps, new weights and adapters, pauses and failing steps, drawn at random: every answer is
that of a plain engine that was asked for nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostinato import LLM

from .everything_driver import NAMES, PARTS, Driver
from .everything_world import OF_TEXT, PLAIN, World

SMALL: dict[str, Any] = {
    "max_model_len": 96,
    "max_running_requests": 4,
    "chunked_prefill_size": 16,
    "cuda_graph_bs": (1, 4),
    "cuda_graph_prefill_tokens": (8, 16),
    "num_pages": 8,
    "steps_ahead": 1,
    "max_logprobs": -1,
    "dtype": "float32",
    "enable_cudagraph_gc": True,
}
LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8}
SLEEP = {"enable_sleep_mode": True, "hostile_wake": True}
LOOKUP = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@dataclass(frozen=True)
class Setup:
    """An engine, and the model that it serves."""

    mode: str
    options: dict[str, Any] = field(default_factory=dict)
    drafts: dict[str, Any] | None = None
    family: str = "Llama"
    fields: dict[str, Any] = field(default_factory=dict)

    def world(self, place: Path) -> World:
        """All that its requests can be about."""
        if self.drafts is not None and "eagle" in self.drafts["method"]:
            return World.of_walks(place, self.drafts["method"])
        return World.of_texts(place, self.family, **self.fields)

    def engine(self, world: World) -> LLM:
        """One for this world."""
        options = {**SMALL, "cuda_graph_mode": self.mode, **self.options}
        if self.drafts is not None:
            drafts = {"num_speculative_tokens": 3, "disable_adaptive": True, **self.drafts}
            model = {} if drafts["method"] == "ngram" else {"model": world.draft}
            options["speculative_config"] = {**drafts, **model}
        return LLM(world.directory, **options)


QWEN2 = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
SETUPS = {
    "draft model": Setup("full-and-piecewise", {**LORA, **SLEEP}, {"method": "draft_model"}),
    "lookup": Setup("full", {**LORA, **SLEEP}, LOOKUP),
    "lookup in pieces": Setup(
        "piecewise", {**LORA, **SLEEP, "steps_ahead": 0}, {**LOOKUP, "disable_adaptive": False}
    ),
    "eagle3": Setup("full", {**LORA, **SLEEP}, {"method": "eagle3"}),
    "eagle": Setup("full-decode-only", {**LORA, **SLEEP, "steps_ahead": 0}, {"method": "eagle"}),
    "no drafts": Setup("full", {**LORA, **SLEEP}),
    "no adapters": Setup("full-and-piecewise", {**SLEEP, "enable_prefix_caching": False}),
    "no graphs": Setup("none", {**LORA, "enable_chunked_prefill": False}),
    "shared prefixes": Setup("full", {**LORA, **SLEEP, "enable_cascade_attention": True}),
    "window": Setup("full", {**LORA, **SLEEP}, LOOKUP, "Mistral", {"sliding_window": 24, "head_dim": 8}),
    "some windows": Setup("full", {**LORA, **SLEEP}, {"method": "draft_model"}, "Qwen2", QWEN2),
}
OFTEN = ("draft model",)


def action(
    name: str, /, **arguments: st.SearchStrategy[Any]
) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


names, flags = st.sampled_from(NAMES), st.booleans()
modes = st.sampled_from(("keep", "keep", "wait", "abort"))
tags = st.sampled_from((None, ["weights"], ["kv_cache"], ["graphs"], ["scheduling"]))


@cache
def actions(has_text: bool) -> st.SearchStrategy[list[tuple[str, dict[str, Any]]]]:
    """What is done to an engine, one after the other."""
    kinds = ("embedding", *PLAIN, *(OF_TEXT if has_text else ()))
    asking = action(
        "ask",
        kind=st.sampled_from(kinds),
        prompt=st.integers(0, 9),
        tokens=st.integers(1, 16),
        adapter=st.none() | names,
    )
    stepping = action("step", times=st.integers(1, 6))
    disturbing = st.one_of(
        action("abort", which=st.integers(0, 5)),
        action("sleep", level=st.integers(0, 2), mode=modes),
        action("wake_up", tags=tags),
        action("pause", mode=modes, clear_cache=flags),
        action("resume"),
        action("flush", running=flags),
        action("update", weights=st.integers(0, 1), as_iterator=flags),
        action("load", name=names, contents=st.integers(0, 3)),
        action("unload", name=names),
        action("pin", name=names),
        action("fail", part=st.sampled_from(PARTS), at=st.integers(0, 2), behind=flags),
    )
    drawn = st.lists(st.one_of(asking, asking, stepping, disturbing), min_size=8, max_size=30)
    loading = st.tuples(*[action("load", name=st.just(name), contents=st.integers(0, 3)) for name in NAMES])
    return st.builds(lambda first, then: [*first, *then], loading, drawn)


@pytest.fixture(
    scope="module",
    params=[name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in SETUPS],
)
def setting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, World]]:
    setup = SETUPS[request.param]
    world = setup.world(tmp_path_factory.mktemp("everything"))
    with setup.engine(world) as llm, world.alone.llm:
        yield llm, world


REPEATABLE = settings(deadline=None, suppress_health_check=[*HealthCheck])


@settings(REPEATABLE, max_examples=3, derandomize=True)
@given(data=st.data())
def test_every_answer_is_that_of_a_plain_engine(setting: tuple[LLM, World], data: st.DataObject) -> None:
    llm, world = setting
    Driver(llm, world).run(data.draw(actions(llm.tokenizer is not None)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(REPEATABLE, max_examples=60)
@given(data=st.data())
def test_the_same_for_long(setting: tuple[LLM, World], data: st.DataObject) -> None:
    llm, world = setting
    Driver(llm, world).run(data.draw(actions(llm.tokenizer is not None)))


def test_a_crowd_is_preempted_and_finds_prefixes(setting: tuple[LLM, World]) -> None:
    """These engines are small enough for what is drawn above to happen."""
    llm, world = setting
    scheduler = llm.engine.core.scheduler
    before = scheduler.num_preemptions
    crowd = [("ask", {"kind": "greedy", "prompt": at, "tokens": 16, "adapter": None}) for at in (6, 7, 8, 9)]
    Driver(llm, world).run([*crowd, ("step", {"times": 9}), *crowd])
    assert scheduler.num_preemptions > before
    if llm.config.enable_prefix_caching:
        assert scheduler.pages.statistics.hit_tokens > 0
