"""A steady step with drafts: two launches, nothing sent, nothing read before the next one is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from engine.conftest import TinyModel
from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.engine.stepping.device_rows import DeviceRows
from ostinato.engine.stepping.token_return import Launched
from ostinato.graphs import CudaGraphRunner, InputBuffers

from .oracle import Oracle, key_of, oracle_llm
from .test_speculation import SMALL

DRAFTS = 2
READS = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
}


class ReadBackError(AssertionError):
    """A value was read where only launches may be."""


class NoReads(TorchFunctionMode):
    """Refuses whatever makes the host wait for a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in READS and args[0].device.type == self._device.type:
            raise ReadBackError(f"{func.__name__} in a steady step")
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def engine(tiny: TinyModel) -> Iterator[tuple[LLM, Oracle]]:
    with oracle_llm(tiny.directory, DRAFTS, cuda_graph_mode="full", steps_ahead=1, **SMALL) as found:
        yield found


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order."""
    found: list[str] = []

    def noted(of: type, name: str, told: Callable[..., str | None]) -> None:
        before = getattr(of, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            text = told(self, *args)
            if text is not None:
                found.append(text)
            return before(self, *args, **kwargs)

        monkeypatch.setattr(of, name, call)

    noted(CudaGraphRunner, "rerun", lambda self, shape: f"launch {shape.query_len}")
    noted(CudaGraphRunner, "run_eagerly", lambda self, *_: "not from a graph")
    noted(InputBuffers, "fill_as", lambda self, *_: "filled")
    noted(DeviceRows, "send", lambda self: "sent" if self._changes else None)
    noted(Launched, "read", lambda self: "read")
    return found


def run(engine: tuple[LLM, Oracle], events: list[str], prompts: list[list[int]]) -> list[list[str]]:
    """Serve these together; what each step did, and nothing that a launch may not do."""
    llm, _ = engine
    core = llm.engine.core
    params = SamplingParams(temperature=0, max_tokens=40)
    for prompt in prompts:
        llm.engine.add({"prompt_token_ids": prompt}, params)
    steps = []
    launch = core._launch
    try:
        device = next(core.loaded.model.parameters()).device
        core._launch = lambda flight: _without_reads(launch, flight, device)  # type: ignore[method-assign]
        while llm.engine.has_work:
            events.clear()
            llm.engine.step()
            steps.append(events.copy())
    finally:
        core._launch = launch  # type: ignore[method-assign]
        while llm.engine.has_work:  # so that the next test finds nothing of this one
            llm.engine.step()
    return steps


def _without_reads(launch: Callable[[Any], None], flight: Any, device: torch.device) -> None:
    if flight.step.is_steady:
        with NoReads(device):
            launch(flight)
    else:
        launch(flight)


@pytest.mark.parametrize("prompts", [[[5, 9, 3]], [[5, 9, 3], [7, 1, 2, 8], [4, 4]]], ids=["alone", "three"])
def test_a_steady_step_is_two_launches(
    engine: tuple[LLM, Oracle], events: list[str], prompts: list[list[int]], tiny: TinyModel
) -> None:
    llm, oracle = engine
    params = SamplingParams(temperature=0, max_tokens=40)
    for at, prompt in enumerate(prompts):
        # Some are right and some are not: lengths differ, and only the device knows them.
        text = tiny.greedy(tuple(prompt), 40)
        oracle.known[key_of(prompt, params)] = [
            token if place % (3 + at) else 0 for place, token in enumerate(text)
        ]
    steps = run(engine, events, prompts)
    steady = [f"launch {DRAFTS}", f"launch {DRAFTS + 1}", "read"]
    assert steps.count(steady) >= 4, steps
    longest = max(len(list(of)) for of in _stretches(steps, steady))
    assert longest >= 3
    assert not llm.graph_report().eager_steps


def _stretches(steps: list[list[str]], steady: list[str]) -> Iterator[list[list[str]]]:
    run: list[list[str]] = []
    for step in [*steps, []]:
        if step == steady:
            run.append(step)
        else:
            yield run
            run = []


def test_reading_a_value_back_is_noticed(
    engine: tuple[LLM, Oracle], events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Oracle.run

    def curious(self: Oracle, rows: Any, num_drafts: int) -> None:
        before(self, rows, num_drafts)
        self._rows["lengths"].tolist()

    monkeypatch.setattr(Oracle, "run", curious)
    with pytest.raises(ReadBackError):
        run(engine, events, [[5, 9, 3]])
