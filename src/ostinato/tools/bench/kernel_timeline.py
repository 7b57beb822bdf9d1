"""What the GPU did while something ran, from the profiler's trace: launches, and time without work.

Note [Idle time]
The trace has one event per kernel and copy on the device, with the number (`correlation`) of the call on the
host that launched it; all kernels of a graph carry the number of its one launch. Over a window from the
start of the first to the end of the last event, the time in which no event runs is idle. It is `inside`
where the events before and after the gap come from one launch: the device goes from node to node of a graph,
nobody is waited for. It is `between` where the event behind the gap comes from another launch than the one
before it. Of that, it is `waiting` up to the end of the call that launched the event behind the gap: only
then did the device have nothing to do because of the host. The rest is what the device itself takes from one
launch to the next, as from node to node. A call that the trace does not have counts as late.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_ON_HOST = {"cuda_runtime", "cuda_driver"}


@dataclass(frozen=True)
class DeviceEvent:
    """A kernel or copy, in microseconds."""

    start: float
    end: float
    launch: int
    """Number of the call that launched it."""


@dataclass(frozen=True)
class Idle:
    """How a window of the device's time was spent, in microseconds; see Note [Idle time]."""

    window: float
    inside: float
    between: float
    waiting: float
    """Of `between`, for the host."""

    @property
    def share(self) -> float:
        """Share of the window without work."""
        return (self.inside + self.between) / self.window

    @property
    def share_between(self) -> float:
        """Share of the window without work, between launches."""
        return self.between / self.window

    @property
    def share_waiting(self) -> float:
        """Share of the window in which the device waited for the host."""
        return self.waiting / self.window


@dataclass(frozen=True)
class Timeline:
    """The device's events in the order of their start, and the launches of the host by kind."""

    events: tuple[DeviceEvent, ...]
    launches: Mapping[str, int]
    """How often the host launched a `graph`, a `kernel`, a `copy` (memset included)."""
    launched_at: Mapping[int, float] = field(default_factory=dict)
    """When the call of each launch was over, by the launch's number."""

    @classmethod
    def of_trace(cls, trace: Iterable[Mapping[str, Any]]) -> Timeline:
        """From the events of a Chrome trace."""
        events, launches, launched_at = [], Counter[str](), dict[int, float]()
        for event in trace:
            category = event.get("cat")
            if category in _ON_DEVICE:
                start = float(event["ts"])
                launch = int(event.get("args", {}).get("correlation", -1))
                events.append(DeviceEvent(start, start + float(event["dur"]), launch))
            elif category in _ON_HOST and (kind := _kind_of_launch(event["name"])):
                launches[kind] += 1
                launch = int(event.get("args", {}).get("correlation", -1))
                launched_at[launch] = float(event["ts"]) + float(event["dur"])
        return cls(tuple(sorted(events, key=lambda event: event.start)), dict(launches), launched_at)

    @property
    def num_launches(self) -> int:
        """Launches that put work on the device."""
        return len({event.launch for event in self.events})

    def last_launches(self, count: int) -> tuple[DeviceEvent, ...]:
        """The events of the last `count` launches."""
        order = list(dict.fromkeys(event.launch for event in self.events))
        wanted = set(order[-count:])
        return tuple(event for event in self.events if event.launch in wanted)


def _kind_of_launch(name: str) -> str | None:
    if "GraphLaunch" in name:
        return "graph"
    if "LaunchKernel" in name or "LaunchCooperativeKernel" in name:
        return "kernel"
    return "copy" if "Memcpy" in name or "Memset" in name else None


def idle_time(events: Sequence[DeviceEvent], launched_at: Mapping[int, float]) -> Idle:
    """Idle time over these events, which are in the order of their start; see Note [Idle time]."""
    inside = between = waiting = 0.0
    busy_until, launch = events[0].end, events[0].launch
    for event in events[1:]:
        gap = max(0.0, event.start - busy_until)
        if event.launch == launch:
            inside += gap
        else:
            between += gap
            waiting += max(0.0, min(gap, launched_at.get(event.launch, event.start) - busy_until))
        if event.end > busy_until:
            busy_until = event.end
        launch = event.launch
    return Idle(busy_until - events[0].start, inside, between, waiting)


def timeline_of(call: Callable[[], object]) -> Timeline:
    """Run `call` under the profiler, device activities only: recording host operations would slow it."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text())
    return Timeline.of_trace(trace["traceEvents"])
