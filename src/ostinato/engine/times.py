"""Where the time goes: CPU time of steps by part, and start-up by phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, perf_counter_ns


@dataclass(frozen=True)
class StepTimes:
    """CPU time of the steps of a while."""

    steps: int
    """Steps launched."""
    microseconds: dict[str, float]
    """In all, by part: `schedule` (what the next step computes), `launch` (rows, forward and sampling
    graphs), `wait` (for the tokens of the step before), `complete` (books on them), `deliver` (text, stop
    strings, outputs)."""

    def per_step(self, part: str) -> float:
        """Microseconds of one part in an average step."""
        return self.microseconds[part] / self.steps if self.steps else 0.0


class StepClock:
    """Adds up nanoseconds by part; each `lap` ends where the next part begins."""

    PARTS = ("schedule", "launch", "wait", "complete", "deliver")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.steps = 0
        self._nanoseconds = dict.fromkeys(self.PARTS, 0)
        self._began = perf_counter_ns()

    def start(self) -> None:
        """What follows belongs to the next lap."""
        self._began = perf_counter_ns()

    def lap(self, part: str) -> None:
        """The time since the last lap or start was for this part."""
        now = perf_counter_ns()
        self._nanoseconds[part] += now - self._began
        self._began = now

    def read(self) -> StepTimes:
        """The totals so far."""
        return StepTimes(self.steps, {part: total / 1000 for part, total in self._nanoseconds.items()})


@dataclass
class StartupTimes:
    """Seconds by phase, in the order in which they were."""

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
        """Count time that was measured elsewhere."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """Seconds by phase, and their `total`."""
        return {**self.seconds, "total": sum(self.seconds.values())}
