"""The GPU's activity while something ran, from the profiler's trace: launches, and time without work.

Note [Idle time]
The trace has one event per kernel and copy on the device, with the number (`correlation`) of the host call
that launched it; all kernels of a graph have the number of its one launch. In a window from the start of the
first to the end of the last event, time in which no event runs is idle. It is `inside` if the events before
and after the gap come from one launch: the device goes from node to node of a graph and waits for nothing
else. It is `between` if they come from different launches. Of that, it is `waiting` until the end of the call
that launched the event after the gap: only until then did the device have nothing to do because of the host.
The rest is the device's own time from one launch to the next, as from node to node. A call that is missing
from the trace counts as late.
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
    """How the device spent a window of time, in microseconds; see Note [Idle time]."""

    window: float
    inside: float
    between: float
    waiting: float
    """The part of `between` in which it waited for the host."""

    @property
    def share(self) -> float:
        """Fraction of the window without work."""
        return (self.inside + self.between) / self.window

    @property
    def share_between(self) -> float:
        """Fraction of the window without work, between launches."""
        return self.between / self.window

    @property
    def share_waiting(self) -> float:
        """Fraction of the window in which the device waited for the host."""
        return self.waiting / self.window


@dataclass(frozen=True)
class Timeline:
    """The device's events in order of start, and the host's launches by kind."""

    events: tuple[DeviceEvent, ...]
    launches: Mapping[str, int]
    """How often the host launched a `graph`, a `kernel`, a `copy` (including memset)."""
    launched_at: Mapping[int, float] = field(default_factory=dict)
    """When the call of each launch ended, by the launch's number."""

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
        """Number of launches that gave the device work."""
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
    """Idle time of these events, in order of start; see Note [Idle time]."""
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
    """Run `call` under the profiler, device activities only: recording host operations would slow it down."""
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
