"""Launches and idle time, from traces written by hand."""

import pytest

from ostinato.bench.kernel_timeline import DeviceEvent, Timeline, idle_time


def kernel(start: float, duration: float, launch: int, category: str = "kernel") -> dict[str, object]:
    return {
        "cat": category,
        "name": "k",
        "ts": start,
        "dur": duration,
        "args": {"correlation": launch},
    }


def call(
    name: str, category: str = "cuda_runtime", *, ends: float = 1.0, launch: int = 0
) -> dict[str, object]:
    return {"cat": category, "name": name, "ts": ends - 1, "dur": 1.0, "args": {"correlation": launch}}


def test_gaps_inside_a_launch_are_told_from_gaps_between_launches() -> None:
    trace = [
        kernel(0, 10, 1),
        kernel(12, 8, 1),  # 2 idle inside graph 1
        kernel(25, 5, 2),  # 5 idle between
        kernel(28, 12, 2),  # overlaps: no gap
        kernel(50, 10, 3, "gpu_memcpy"),  # 10 idle between
    ]
    launched = [call("cudaGraphLaunch", ends=18, launch=2), call("cudaMemcpyAsync", ends=47, launch=3)]
    timeline = Timeline.of_trace([*reversed(trace), *launched])
    idle = idle_time(timeline.events, timeline.launched_at)
    assert (idle.window, idle.inside, idle.between) == (60, 2, 15)
    assert idle.waiting == 7, "launch 2 was there in time, launch 3 came 7 after the device had run dry"
    assert idle.share == pytest.approx(17 / 60)
    assert idle.share_between == pytest.approx(0.25)
    assert idle.share_waiting == pytest.approx(7 / 60)


def test_a_launch_that_the_trace_does_not_have_is_waited_for() -> None:
    idle = idle_time([DeviceEvent(0, 10, 1), DeviceEvent(14, 20, 2)], {})
    assert idle.waiting == idle.between == 4


def test_a_short_event_under_a_long_one_makes_no_gap() -> None:
    events = [
        DeviceEvent(0, 100, 1),
        DeviceEvent(10, 20, 2),
        DeviceEvent(60, 70, 3),
        DeviceEvent(100, 110, 4),
    ]
    assert idle_time(events, {}).share == 0


def test_launches_are_counted_by_kind() -> None:
    trace = [
        call("cudaGraphLaunch"),
        call("cudaLaunchKernel"),
        call("cudaLaunchKernelExC"),
        call("cuLaunchKernelEx", "cuda_driver"),
        call("cudaMemcpyAsync"),
        call("cudaStreamSynchronize"),
        call("aten::add", "cpu_op"),
    ]
    assert Timeline.of_trace(trace).launches == {"graph": 1, "kernel": 3, "copy": 1}


def test_the_last_launches_are_the_last_on_the_device() -> None:
    timeline = Timeline.of_trace([kernel(10.0 * at, 5, at // 2) for at in range(8)])
    assert timeline.num_launches == 4
    assert [event.start for event in timeline.last_launches(2)] == [40, 50, 60, 70]
