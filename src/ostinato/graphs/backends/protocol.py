"""What the runtime asks of a device: record a step once, in one or several segments, and replay it.

A capture is a `Session`. The life of one:

    begin -> (pause -> resume)* -> finish        or abort, from any point

Between `begin` and `finish` the caller runs the user's step. `pause` closes a segment (at an eager
boundary), `resume` opens the next. What the replay will need to find again, outputs and the arguments of
eager calls, is announced with `keep` while its value is at hand and looked up after `finish`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..options import CaptureOptions


class PoolMemory(Protocol):
    """The memory that all graphs of a pool share."""

    @property
    def bytes(self) -> int:
        """Bytes taken from the device so far."""
        ...

    def contains(self, address: int) -> bool:
        """Whether an address lies in this memory."""
        ...


class Segment(Protocol):
    """A recorded stretch of device work."""

    def replay(self) -> None:
        """Do the work again, on the same addresses."""
        ...


@dataclass
class Kept:
    """A pytree whose tensors are wanted again at replay."""

    tree: Any = None
    """The same pytree with tensors at the addresses the replay uses. Valid after `finish`."""


@dataclass
class Recording:
    """A finished capture."""

    segments: Sequence[Segment]
    nodes: int | None
    """Graph nodes (recorded calls on the tape); None when the device cannot tell."""
    raw: Any = None
    """The raw graphs, one per segment, if they were asked for."""


class Session(Protocol):
    """One capture in progress."""

    def begin(self) -> None:
        """Start to record the first segment."""
        ...

    def pause(self) -> None:
        """Close the current segment. Afterwards every value computed so far is real and may be read."""
        ...

    def resume(self) -> None:
        """Start to record the next segment."""
        ...

    def keep(self, tree: Any) -> Kept:
        """Announce tensors that replay must find. Their memory stays the pool's: others may reuse it."""
        ...

    def finish(self) -> Recording:
        """Close the last segment. State outside the graph is as it was before `begin`."""
        ...

    def abort(self) -> None:
        """Give up: leave no capture open and no state changed. Never raises."""
        ...


class Backend(Protocol):
    """A kind of device that graphs can be captured on."""

    name: str
    device: torch.device

    def new_memory(self, source: Any = None) -> PoolMemory:
        """`source`: a `capturing.pool.Memory`, or None for torch's allocator."""
        ...

    def session(self, memory: PoolMemory, options: CaptureOptions) -> Session: ...

    def stream(self) -> AbstractContextManager[Any]:
        """The one dedicated stream that captures (and an engine's steps) run on."""
        ...

    def release_unused(self) -> None:
        """Return cached memory to the device, after a capture did not fit."""
        ...

    def rng_state(self) -> torch.Tensor: ...

    def set_rng_state(self, state: torch.Tensor) -> None: ...

    def order_replays(self) -> None:
        """Make the current stream wait for the last replay, if that ran on another stream."""
        ...
