"""Where the time goes: CPU time of steps by part, and startup by phase."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, perf_counter_ns


@dataclass(frozen=True)
class StepTimes:
    """CPU time of the steps in a period."""

    steps: int
    """Steps launched."""
    microseconds: dict[str, float]
    """In total, by part: `schedule` (choosing what the next step computes), `launch` (rows, forward and
    sampling graphs), `wait` (for the tokens of the step before), `complete` (updating the books), `deliver`
    (text, stop strings, outputs)."""
    device_microseconds: float = 0.0
    """By the device's clock, over decode steps launched while the step before was under way: from that step's
    end to their own. 0 without a GPU."""
    idle_microseconds: float = 0.0
    """The part of it before the decode step began: the device was idle, or was updating rows."""

    @property
    def idle_share(self) -> float:
        """Share of the device's time in which it waited for a decode step."""
        return self.idle_microseconds / self.device_microseconds if self.device_microseconds else 0.0

    def per_step(self, part: str) -> float:
        """Microseconds of one part in an average step."""
        return self.microseconds[part] / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class OneStep:
    """One step, from its beginning to that of the next, in microseconds."""

    microseconds: float
    parts: dict[str, float]
    """As in `StepTimes`."""


class StepClock:
    """Sums up nanoseconds by part; each `lap` ends where the next part begins."""

    PARTS = ("schedule", "launch", "wait", "complete", "deliver")

    def __init__(self) -> None:
        self._marks: list[tuple[int, tuple[int, ...]]] | None = None
        self.reset()

    @contextmanager
    def recording(self) -> Iterator[list[OneStep]]:
        """Each step that begins and ends inside, separately; the list is filled at the end."""
        found: list[OneStep] = []
        self._marks = []
        try:
            yield found
        finally:
            marks, self._marks = self._marks, None
            for (began, before), (ended, after) in itertools.pairwise(marks):
                parts = zip(self.PARTS, before, after, strict=True)
                spent = {part: (late - early) / 1000 for part, early, late in parts}
                found.append(OneStep((ended - began) / 1000, spent))

    def reset(self) -> None:
        """Start over."""
        self.steps = 0
        self._nanoseconds = dict.fromkeys(self.PARTS, 0)
        self._began = perf_counter_ns()
        self._device_ns = self._idle_ns = 0
        self._device_ended: int | None = None

    def start(self) -> None:
        """A step begins: what follows belongs to the next lap."""
        self._began = perf_counter_ns()
        if self._marks is not None:
            self._marks.append((self._began, tuple(self._nanoseconds.values())))

    def lap(self, part: str) -> None:
        """Attribute the time since the last lap or start to this part."""
        now = perf_counter_ns()
        self._nanoseconds[part] += now - self._began
        self._began = now

    def on_device(self, span: tuple[int, int] | None, *, counts: bool) -> float | None:
        """A step ran on the device: when it began and ended, in nanoseconds of the device's clock, if known.

        `counts`: whether its beginning is known, and it was launched while the step before was under way.
        Returns the seconds from that step's end to its own, if both are known.
        """
        if span is None:
            self._device_ended = None
            return None
        (began, ended), before = span, self._device_ended
        self._device_ended = ended
        if before is None:
            return None
        if counts:
            self._device_ns += ended - before
            self._idle_ns += max(0, began - before)
        return (ended - before) / 1e9

    def read(self) -> StepTimes:
        """The totals so far."""
        parts = {part: total / 1000 for part, total in self._nanoseconds.items()}
        return StepTimes(self.steps, parts, self._device_ns / 1000, self._idle_ns / 1000)


@dataclass
class StartupTimes:
    """Seconds by phase, in the order in which the phases came."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        began = perf_counter()
        try:
            yield
        finally:
            self.add(name, perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        """Add time measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """Seconds by phase, and their `total`."""
        return {**self.seconds, "total": sum(self.seconds.values())}
