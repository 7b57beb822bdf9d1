"""A start's rehearsal, on a CPU, where it compiles nothing: what it runs, and what it leaves."""

import dataclasses
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ostinato.engine.config import EngineConfig
from ostinato.engine.llm import LLM
from ostinato.engine.loading import load as loading
from ostinato.engine.loading import rehearsal
from ostinato.engine.loading.device_memory import OUTSIDE_GRAPHS, DeviceMemory, MemoryPlan
from ostinato.engine.loading.load import kv_shape
from ostinato.engine.resolved_config import ResolvedConfig
from ostinato.engine.sampling.sampler import Sampler
from ostinato.engine.stepping.model_runner import KVCache, ModelRunner
from ostinato.engine.stepping.times import StartupTimes
from ostinato.graphs import GraphKey, Ladder, capture_keys
from ostinato.kernels.linear import products
from ostinato.kernels.linear.tiles import PromptTile, SkinnyTile

from .conftest import TinyModel
from .test_engine_greedy import SMALL


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Four layers, all alike."""
    return TinyModel(tmp_path_factory.mktemp("deep"), "Llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def llm(deep: TinyModel) -> Any:
    with LLM(deep.directory, progress=False, dtype="float32", **SMALL) as llm:
        yield llm


def new_runner(llm: LLM) -> ModelRunner:
    loaded = llm.engine.core.loaded
    kv = KVCache(kv_shape(loaded.model, loaded.config), 2, loaded.config.device)
    return ModelRunner(loaded.model, kv, loaded.attention, loaded.config)


def count_layers(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the layers that attend."""
    seen: list[int] = []
    caches = runner.kv.layer
    monkeypatch.setattr(runner.kv, "layer", lambda index: seen.append(index) or caches(index))
    return seen


class OnHost(rehearsal.Rehearsal):
    """A rehearsal that goes as on a GPU."""

    def __init__(self, llm: LLM, *, num_pages: int | None = None) -> None:
        loaded = llm.engine.core.loaded
        asked = dataclasses.replace(llm.config, num_pages=num_pages)
        self.times = StartupTimes()
        super().__init__(
            dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, config=asked)), self.times
        )

    @property
    def _is_on_gpu(self) -> bool:
        return True


class NoCompilation:
    """In place of `Compilation`: what is tried out runs."""

    def __init__(self, device: torch.device) -> None:
        self.happened: list[str] = []

    def __enter__(self) -> "NoCompilation":
        return self

    def __exit__(self, *_: object) -> None:
        self.happened.append("end")

    def collecting(self) -> Any:
        self.happened.append("collect")
        return nullcontext()

    def begin(self) -> None:
        self.happened.append("begin")


def test_a_rehearsal_tries_two_layers_and_captures_all_of_them(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And warms none of them up: what a first run makes is there."""
    monkeypatch.setattr(rehearsal, "Compilation", NoCompilation)
    monkeypatch.setattr(ResolvedConfig, "warmups", 1)
    runner = new_runner(llm)
    kinds = {runner.planned.kernels_of(key) for key in runner.graphs.keys}
    assert len(runner.graphs.keys) > len(kinds) == 2
    seen = count_layers(runner, monkeypatch)
    monkeypatch.setattr(rehearsal, "ModelRunner", lambda *_, **__: runner)
    trial = OnHost(llm)
    with trial:
        assert seen == [0, 1] * len(kinds)
        seen.clear()
    tried = rehearsal._some_of(runner.graphs.keys, runner.planned.widens)
    assert len(tried) > len(kinds)
    plan = trial.plan()
    assert seen == [0, 1, 2, 3] * len(tried), "a recording of each"
    assert trial.warm == {runner.planned.warmed_with(key) for key in runner.graphs.keys}
    assert plan.activations is not None
    assert plan.activations > 0
    assert not runner.graphs.graphs


def test_a_rehearsal_captures_what_takes_most_where_that_is_not_the_largest() -> None:
    """From 4,096 tokens on a kernel may leave gate and up unmade, which are half of what a step takes."""
    keys = capture_keys("FULL", Ladder([1, 8]), Ladder([64, 3840, 4096, 4608]), max_reqs=8)
    mixed = [key for key in keys if not key.descriptor.is_uniform]

    def tried(widens: Callable[[GraphKey], bool]) -> list[int]:
        some = rehearsal._some_of(keys, widens)
        assert {key.descriptor.num_tokens for key in some if key.descriptor.is_uniform} == {1, 8}
        return [key.descriptor.num_tokens for key in some if key in mixed]

    assert tried(lambda key: key.descriptor.num_tokens < 4096) == [4608, 3840, 64]
    assert tried(lambda _: True) == tried(lambda _: False) == [4608, 64]


def test_a_step_with_adapters_widens_its_rows_at_any_size(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = new_runner(llm)
    [key, *_] = runner.graphs.keys
    adapted = key._replace(descriptor=dataclasses.replace(key.descriptor, lora=2))
    assert runner.planned.widens(key), "plain torch does, on a CPU"
    monkeypatch.setattr(products, "choose", lambda *_: PromptTile())
    assert not runner.planned.widens(key)
    assert runner.planned.widens(adapted)
    monkeypatch.setattr(products, "choose", lambda *_: SkinnyTile(16, 64, 64, 4, 3))
    assert not runner.planned.widens(adapted)


def test_a_rehearsal_predicts_what_the_graphs_of_the_engine_take(llm: LLM) -> None:
    runner = new_runner(llm)
    sampler = Sampler(runner)
    plan = rehearsal._trial_capture(runner, sampler)
    report = llm.graph_report()
    expected = {f"{key.mode} {key.descriptor}": size for key, size in plan.rungs[0].items()}
    assert expected.keys() == {f"{row.mode} {row.descriptor}" for row in report.graphs}
    assert plan.activations == pytest.approx(llm.memory_report()["activations"], rel=0.15)
    assert sum(expected.values()) == pytest.approx(sum(row.bytes for row in report.graphs), rel=0.15)


def test_with_a_budget_that_is_too_small_all_of_it_is_expected_to_be_taken(llm: LLM) -> None:
    runner = new_runner(llm)
    runner.pool.budget = 30_000
    assert rehearsal._trial_capture(runner, None).activations == 30_000


def test_graphs_of_kernels_that_were_not_tried_out_are_warmed_up(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResolvedConfig, "warmups", 1)
    runner = new_runner(llm)
    kinds = {runner.planned.warmed_with(key) for key in runner.graphs.keys}
    runner.graphs.take_as_warm(list(kinds)[1:])
    seen = count_layers(runner, monkeypatch)
    runner.capture(StartupTimes(), progress=False)
    assert seen == [0, 1, 2, 3] * (1 + len(runner.graphs.keys))


def test_weights_are_read_while_kernels_are_compiled(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[NoCompilation] = []

    def make(device: torch.device) -> NoCompilation:
        made.append(NoCompilation(device))
        return made[0]

    monkeypatch.setattr(rehearsal, "Compilation", make)
    with OnHost(llm, num_pages=9):
        [compilation] = made
        assert compilation.happened == ["collect", "begin"]
    assert compilation.happened == ["collect", "begin", "end"]


def _no_room(_: rehearsal.Rehearsal) -> None:
    raise torch.OutOfMemoryError


def test_weights_that_cannot_be_read_and_steps_that_fail_end_a_compilation(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[type[BaseException] | None] = []

    class Noted(NoCompilation):
        def __exit__(self, kind: Any, *_: object) -> None:
            ended.append(kind)

    monkeypatch.setattr(rehearsal, "Compilation", Noted)
    with pytest.raises(ValueError, match="no such tensor"), OnHost(llm, num_pages=9):
        raise ValueError("no such tensor")
    assert ended == [ValueError]
    monkeypatch.setattr(rehearsal.Rehearsal, "_try_out", _no_room)
    with pytest.raises(torch.OutOfMemoryError), OnHost(llm, num_pages=9):
        pytest.fail("has begun")
    assert ended == [ValueError, torch.OutOfMemoryError], "while kernels are collected, some compile already"


def test_on_a_cpu_there_is_nothing_to_rehearse(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "ModelRunner", lambda *_, **__: pytest.fail("made"))
    times = StartupTimes()
    trial = rehearsal.Rehearsal(llm.engine.core.loaded, times)
    with trial:
        pass
    assert (trial.plan(), trial.warm, times.seconds) == (MemoryPlan(), frozenset(), {})


def test_room_is_kept_for_buffers_that_come_behind_the_kv_cache(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a runner and of a sampler are on the device while it is measured, and are counted."""
    made: list[str] = []

    def noted(name: str) -> Any:
        make = getattr(rehearsal, name)
        return lambda *arguments, **more: made.append(name) or make(*arguments, **more)

    for name in ("ModelRunner", "Sampler"):
        monkeypatch.setattr(rehearsal, name, noted(name))
    monkeypatch.setattr(
        rehearsal.DeviceMemory, "now", lambda _: rehearsal.DeviceMemory(allocated=100 * len(made))
    )
    monkeypatch.setattr(rehearsal, "Compilation", NoCompilation)
    monkeypatch.setattr(rehearsal, "_trial_capture", lambda *_: MemoryPlan(activations=7))
    trial = OnHost(llm)
    with trial:
        pass
    assert list(trial.times.seconds) == ["compile"]
    plan = trial.plan()
    assert list(trial.times.seconds) == ["compile", "rehearse"], "what it costs is told apart"
    assert (plan.buffers, plan.to_come) == (200, 200 + 7 + OUTSIDE_GRAPHS)
    assert made == ["ModelRunner", "Sampler"]
    trial = OnHost(llm, num_pages=9)
    with trial:
        pass
    given = trial.plan()
    assert (given.to_come, given.predictions) == (0, {}), "the number of pages is given"


def test_what_a_rehearsal_made_is_gone_before_memory_is_counted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[ModelRunner]] = []
    counted: list[bool] = []
    make = rehearsal.ModelRunner

    def noted(*given: Any, **more: Any) -> ModelRunner:
        runner = make(*given, **more)
        made.append(weakref.ref(runner))
        return runner

    monkeypatch.setattr(rehearsal, "ModelRunner", noted)
    monkeypatch.setattr(rehearsal, "Compilation", NoCompilation)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: counted.append(made[0]() is None))
    readings = iter([100, 110, 115, 130])
    monkeypatch.setattr(DeviceMemory, "now", lambda _: DeviceMemory(allocated=next(readings)))
    gc.disable()
    try:
        trial = OnHost(llm, num_pages=9)
        with trial:
            pass
        plan = trial.plan()
        assert (plan.buffers, plan.workspace) == (5, 30), "what is left is what libraries keep"
    finally:
        gc.enable()
    assert counted == [True]


def test_a_start_walks_all_objects_once(deep: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    collect, collected = gc.collect, []
    monkeypatch.setattr(gc, "collect", lambda *generation: collected.append(1) or collect(*generation))
    with LLM(deep.directory, progress=False, dtype="float32", **{**SMALL, "enable_cudagraph_gc": False}):
        assert len(collected) == 1
        assert gc.isenabled()


def test_triton_starts_beside_loading_on_a_gpu_only(deep: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    class Begun(Exception):
        pass

    def begin() -> None:
        raise Begun

    monkeypatch.setattr(loading.triton_start, "begin", begin)
    on_cpu = EngineConfig(deep.directory, dtype="float32", device="cpu")
    assert loading.place(on_cpu).model is not None
    anywhere = dataclasses.replace(on_cpu, device="auto")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert loading.place(anywhere).model is not None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert loading.place(on_cpu).model is not None
    with pytest.raises(Begun):
        loading.place(anywhere)
