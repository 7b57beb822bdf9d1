"""The device's side of `bench host`, with a made-up device: ten microseconds a step, eight of them work."""

from types import SimpleNamespace
from typing import Any

import pytest

from ostinato.bench import host
from ostinato.bench.kernel_timeline import DeviceEvent, Timeline
from ostinato.bench.workload import Workload

STEP_US = 10.0


class MadeUpEngine:
    """Counts a prefill step and a decode step per further token."""

    def __init__(self) -> None:
        self.steps = 0
        self.llm = SimpleNamespace(step_times=self._step_times)

    def _step_times(self, *, reset: bool) -> Any:
        counted = SimpleNamespace(steps=self.steps)
        self.steps = 0
        return counted

    def run(self, workload: Workload) -> None:
        self.steps += max(workload.output_lens)


def timeline_of_steps(engine: MadeUpEngine, call: Any) -> Timeline:
    before = engine.steps
    call()
    steps = engine.steps - before
    # Per step one graph of two kernels, 4 us each with 1 us between them, then 1 us until the next.
    events = [
        event
        for step in range(steps)
        for event in (
            DeviceEvent(STEP_US * step, STEP_US * step + 4, step),
            DeviceEvent(STEP_US * step + 5, STEP_US * step + 9, step),
        )
    ]
    # The prefill takes three kernel launches more, which must not count. Of the 1 us until the next step, the
    # host needs a quarter.
    launched_at = {step: STEP_US * step - 0.75 for step in range(steps)}
    return Timeline(tuple(events), {"graph": steps, "kernel": 3, "copy": 2 * steps}, launched_at)


def test_shares_and_launches_are_those_of_a_steady_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = MadeUpEngine()
    monkeypatch.setattr(host, "timeline_of", lambda call: timeline_of_steps(engine, call))
    row = host._on_device(engine, Workload.uniform(4, 8, 128, 50))
    # 50 steps without the gap behind the last one.
    window = 50 * STEP_US - 1
    assert row["profiled_idle_share"] == pytest.approx((50 + 49) / window)
    assert row["profiled_idle_share_between_launches"] == pytest.approx(49 / window)
    assert row["profiled_idle_share_waiting"] == pytest.approx(49 / 4 / window)
    assert row["profiled_device_us"] == pytest.approx(9)
    assert row["launches_per_step"] == {"copy": 2, "graph": 1, "kernel": 0}
    assert row["device_events_per_step"] == 2


def test_a_profiler_that_sees_nothing_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = MadeUpEngine()

    def blind(call: Any) -> Timeline:
        call()
        return Timeline((), {})

    monkeypatch.setattr(host, "timeline_of", blind)
    assert host._on_device(engine, Workload.uniform(4, 8, 128, 50)) == {}
