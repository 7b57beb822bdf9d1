"""Requests whose adapter has to be read again, while somebody unloads or replaces it, or aborts all."""

import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from ostinato import LLM, LoRARequest, SamplingParams
from ostinato.server.engine_process.engine_controls import EngineControls
from ostinato.server.engine_process.served_engine import ServedEngine
from ostinato.server.wire.messages import Generate

from .test_lora import write_adapter


@pytest.fixture(scope="module")
def llm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("xyz"):
        write_adapter(folder / name, seed)
    options: dict[str, Any] = {"max_loras": 1, "max_cpu_loras": 1, "cuda_graph_mode": "none", "num_pages": 40}
    with LLM(str(model), enable_lora=True, max_lora_rank=4, max_model_len=64, **options) as llm:
        llm.folder = folder  # type: ignore[attr-defined]
        yield llm


class Late:
    """An engine whose adapter `x` made room for `y`, and is read again only when it may be."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.adapters, self.folder = llm.engine.adapters, llm.folder  # type: ignore[attr-defined]
        for each in self.adapters.listed():
            self.adapters.remove(each.name)
        self.load("x")
        self.load("y")
        self.engine = ServedEngine(llm.engine.core)
        self.gate = threading.Event()
        read = self.adapters.read

        def gated(path: str) -> Any:
            assert self.gate.wait(20)
            return read(path)

        monkeypatch.setattr(self.adapters, "read", gated)
        command = Generate(7, [65, 66], SamplingParams(temperature=0, max_tokens=3), adapter="x")
        assert self.engine.generate(command) == []
        assert self.engine.waits_for_files

    def load(self, name: str, contents: str | None = None) -> None:
        known = self.adapters.named(name)
        number = self.adapters.free_id() if known is None else known.lora_int_id
        path = str(self.folder / (contents or name))
        self.adapters.load(LoRARequest(name, number, path, known is not None))

    def news(self) -> list[Any]:
        """Of the request, to its end."""
        self.gate.set()
        found: list[Any] = []
        for _ in range(2000):
            found += self.engine.carry_on()
            if self.engine.core.has_work:
                found += self.engine.step().news
            elif not self.engine.waits_for_files:
                return found
            threading.Event().wait(0.002)
        raise AssertionError(found)


@pytest.fixture
def late(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Late:
    return Late(llm, monkeypatch)


def test_one_that_was_unloaded_meanwhile_does_not_come_back(late: Late) -> None:
    late.adapters.remove("x")
    [told] = late.news()
    assert told.refused
    assert "'x' is not loaded" in told.error
    assert [each.name for each in late.adapters.listed()] == ["y"]


def test_one_that_was_replaced_meanwhile_serves_as_it_is_now(late: Late) -> None:
    late.gate.set()
    late.load("x", "z")
    late.load("y")  # and x makes room once more
    told = late.news()
    assert [each.error for each in told if each.error] == []
    assert told[-1].finish_reason == "length"
    assert {each.name: Path(each.path).name for each in late.adapters.listed()} == {"x": "z", "y": "y"}


@pytest.mark.parametrize("control", ["pause", "sleep"])
def test_whoever_waits_for_a_file_is_served_before_a_pause_that_waits(
    late: Late, llm: LLM, control: str
) -> None:
    told: list[Any] = []
    controls = EngineControls(llm, late.engine, lambda step: told.extend(step.news)).by_name()
    arguments: dict[str, Any] = {"clear_cache": True} if control == "pause" else {"level": 0}
    waiting = cast(Generator[None, None, None], controls[control](mode="wait", **arguments))
    params = SamplingParams(temperature=0, max_tokens=3)
    for turn in range(2000):
        try:
            next(waiting)
        except StopIteration:
            break
        if turn == 5:
            # One that comes now is held, though its file is there when that of the other is.
            assert late.engine.generate(Generate(8, [65, 66], params, adapter="x")) == []
            late.gate.set()
        told += late.engine.carry_on()
        if late.engine.is_busy:
            told += late.engine.step().news
        threading.Event().wait(0.002)
    else:
        raise AssertionError("the pause never came to its end")
    assert [each.finish_reason for each in told if each.id == 7][-1] == "length"
    assert [each for each in told if each.id == 8] == []
    assert not late.engine.is_busy
    late.engine.core.resume()
    assert [each.finish_reason for each in late.news() if each.id == 8][-1] == "length"


def test_one_that_is_aborted_before_its_file_comes_keeps_no_pause_waiting(late: Late, llm: LLM) -> None:
    controls = EngineControls(llm, late.engine, lambda step: None).by_name()
    waiting = cast(Generator[None, None, None], controls["pause"](mode="wait", clear_cache=False))
    next(waiting)
    late.engine.abort([7])
    with pytest.raises(StopIteration):
        next(waiting)
    late.engine.core.resume()
    assert late.news() == []


def test_whoever_waits_for_a_file_is_aborted_with_all_others(late: Late) -> None:
    [told] = late.engine.abort_all()
    assert (told.id, told.finish_reason) == (7, "abort")
    assert late.news() == []
    assert not late.engine.core.has_work
