"""What an engine can do while parts of its memory are released, and how they go and come back.

A sleeping engine takes no step: requests wait, and an attempt to step raises an error that says what is
missing. Tags may come back one at a time; graphs come back with the KV cache at the latest. When the last one
is back, steps continue, unless the weights were dropped and new ones have not been written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ostinato.graphs import OstinatoError
from ostinato.memory import TAGS, MemorySaver, Tag

from ..loading.device_memory import DeviceMemory
from ..parameters.sampling_params import RequestError

LEVELS = (0, 1, 2)
MODES = ("abort", "wait", "keep")
SCHEDULING = "scheduling"
"""Used like a tag: resume steps after level 0."""


_TAG_OF: dict[str, Tag] = {
    "weights": "weights",
    "adapters": "weights",
    "kv": "kv_cache",
    "inputs": "graphs",
    "outputs": "graphs",
    "sampling": "graphs",
    "activations": "graphs",
}
"""The tag of each line of a memory report."""


class EngineAsleepError(OstinatoError, RuntimeError):
    """A step would touch released memory, or weights that were dropped."""


@dataclass(frozen=True)
class SleepReport:
    """What `sleep` or `wake_up` did. Bytes."""

    tags: tuple[str, ...] = ()
    """Tags released or restored."""
    released: int = 0
    """Returned to the device."""
    backed_up: int = 0
    """Of these, contents copied to the host."""
    taken: int = 0
    """Taken from the device."""
    stays: dict[str, int] = field(default_factory=dict)
    """On a GPU, what remains there, by cause."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By part."""


def check_mode(mode: str) -> None:
    """Raises RequestError for an unknown mode."""
    if mode not in MODES:
        raise RequestError(f"unknown mode {mode!r}: use {', '.join(MODES)}")


class Sleeper:
    """The state of an engine between `sleep` and `wake_up`."""

    def __init__(self, saver: MemorySaver | None, device: torch.device) -> None:
        """`saver`: None for an engine whose memory cannot be released; it supports level 0 only."""
        self._saver = saver
        self._device = device
        self._is_held = False
        self.why_no_weights: str | None = None
        """Why weights must be written before the next step, if they must."""
        self.driver_bytes = 0
        """What the driver holds for graphs, outside of any pool."""
        self.last_sleep = SleepReport()
        self.last_wake = SleepReport()

    @property
    def is_sleeping(self) -> bool:
        """Whether some memory is released, or steps are held."""
        return self._is_held or bool(self._away)

    @property
    def _away(self) -> tuple[Tag, ...]:
        return () if self._saver is None else self._saver.paused

    @property
    def why_no_step(self) -> str | None:
        """Why no step may run now; None: one may."""
        if self._away:
            return f"the engine is asleep (released: {', '.join(self._away)}): call wake_up() first"
        if self._is_held:
            return "the engine is asleep: call wake_up() first"
        if self.why_no_weights is not None:
            return f"{self.why_no_weights}: write new ones with update_weights before anything is generated"
        return None

    def refuse_without_weights(self) -> None:
        """Raises EngineAsleepError while the weights have no memory to write to."""
        if "weights" in self._away:
            raise EngineAsleepError(
                "the engine is asleep (released: weights): call wake_up(['weights']) first"
            )

    def check(self, level: int, mode: str) -> None:
        """Raises RequestError for a sleep that is not possible."""
        if level not in LEVELS or isinstance(level, bool):
            raise RequestError(f"unknown sleep level {level!r}: use {', '.join(map(str, LEVELS))}")
        check_mode(mode)
        if level and self._saver is None:
            raise RequestError(
                f"sleep(level={level}) releases memory: start the engine with enable_sleep_mode=True"
            )

    def let_go(self) -> None:
        """Stop holding steps; they still need what is released."""
        self._is_held = False

    def sleep(self, level: int, tags: Sequence[Tag] = TAGS) -> SleepReport:
        """Nothing may be under way. If it fails, nothing has changed."""
        if not level or self._saver is None:
            self._is_held = True
            return SleepReport()
        paused = self._saver.pause(tags, backup=level == 1)
        self._is_held = True
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # nobody needs torch's cached memory while the engine sleeps
        self.last_sleep = SleepReport(
            paused.tags, paused.released, paused.backed_up, 0, self._what_stays(), paused.seconds
        )
        return self.last_sleep

    def wake_up(self, tags: Sequence[str] | None, weights_are_gone: Callable[[], None]) -> SleepReport:
        """Restore these tags, or all. If it fails, usually for lack of memory, they stay released; try again.

        `weights_are_gone` is called if the contents of the weights did not come back.
        """
        asked = self.checked(tags)
        taken: dict[str, Any] = {}
        if self._saver is not None:
            resumed = self._saver.resume(asked)
            if "weights" in resumed.lost:
                weights_are_gone()
            taken = {"tags": resumed.tags, "taken": resumed.taken, "seconds": resumed.seconds}
        is_asked = tags is None or bool(asked) or SCHEDULING in tags
        if is_asked and not self._away:
            self._is_held = False
        self.last_wake = SleepReport(**taken)
        return self.last_wake

    def less_what_is_away(self, held: dict[str, int]) -> dict[str, int]:
        """Bytes by purpose, 0 for memory that is released now."""
        return {name: 0 if _TAG_OF.get(name) in self._away else size for name, size in held.items()}

    def checked(self, tags: Sequence[str] | None) -> list[Tag]:
        """The requested tags. Raises RequestError for an unknown one."""
        if isinstance(tags, str):
            raise RequestError(f"tags must be a list, not {tags!r}: use [{tags!r}]")
        for tag in tags or ():
            if tag not in (*TAGS, SCHEDULING):
                raise RequestError(f"unknown tag {tag!r}: use {', '.join((*TAGS, SCHEDULING))}")
        if tags is None:
            return list(TAGS)
        return [tag for tag in TAGS if tag in tags or (tag == "graphs" and "kv_cache" in tags)]

    def _what_stays(self) -> dict[str, int]:
        if self._device.type != "cuda" or self._saver is None:
            return {}
        now = DeviceMemory.now(self._device)
        # torch does not know that the memory under its segments is gone.
        away = sum(held.released for of in self._saver.bytes().values() for held in of.values())
        torch_bytes = now.reserved - away
        rest = max(0, now.taken - torch_bytes - self.driver_bytes)
        return {
            "torch: workspaces of libraries, counters, caches": torch_bytes,
            "driver: executables of graphs": self.driver_bytes,
            "context, kernels, libraries, other processes": rest,
        }
