"""What `LLM.step_times` says of the device."""

from typing import Any

import pytest

from ostinato.engine.llm import LLM
from ostinato.engine.parameters.sampling_params import SamplingParams
from ostinato.engine.stepping.times import StepClock

from .conftest import TinyModel, prompts_of
from .test_engine_greedy import SMALL


def test_idle_time_is_what_lies_between_steps_that_follow_each_other() -> None:
    clock = StepClock()
    clock.on_device((100, 1100), counts=False)  # the first
    clock.on_device((1200, 2100), counts=True)  # 100 late
    clock.on_device((2100, 3100), counts=True)
    clock.on_device((3100, 9000), counts=False)  # a prompt: nobody knows when it began
    clock.on_device((9500, 10000), counts=True)
    clock.on_device(None, counts=True)  # nothing was sampled
    clock.on_device((20000, 21000), counts=True)
    clock.on_device((21000, 22000), counts=True)
    times = clock.read()
    assert times.device_microseconds == pytest.approx((1000 + 1000 + 1000 + 1000) / 1000)
    assert times.idle_microseconds == pytest.approx((100 + 500) / 1000)
    assert times.idle_share == pytest.approx(600 / 4000)
    clock.reset()
    clock.on_device((30000, 31000), counts=True)
    assert clock.read().device_microseconds == 0
    assert clock.read().idle_share == 0


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        ({}, True),
        ({"batch_invariant": True, "cuda_graph_prefill_tokens": None}, False),
        ({"cuda_graph_mode": "piecewise"}, False),
        ({"cuda_graph_mode": "none"}, False),
    ],
    ids=str,
)
def test_only_steps_from_decode_graphs_count(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], notes: bool
) -> None:
    counted: list[bool] = []
    monkeypatch.setattr(StepClock, "on_device", lambda self, span, *, counts: counted.append(counts))
    with LLM(tiny.directory, steps_ahead=1, **{**SMALL, **options}) as llm:
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        llm.generate(prompts_of((5, 6)), params)
    assert len(counted) >= 10
    assert any(counted) == notes
