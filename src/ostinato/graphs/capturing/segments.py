"""Piecewise capture: recording stops at a function marked `@eager_boundary` and continues after it.

    segment 0 | attention (eager) | segment 1 | attention (eager) | segment 2

A replay launches the segments and calls the marked functions in the same order. The results of an eager call
are copied into a *bridge*, a buffer at a fixed address that the next segment reads. Its arguments are at the
addresses that the previous segment has just written.

Note [Bridges]
A bridge has separate memory, outside the graph pool, which lives as long as any graph that uses it. Only one
graph runs at a time, so all graphs of a runner share the same bridges: the largest is captured first, and the
smaller rungs fit into what it needed. Within one graph, a bridge is reused for a later boundary once nothing
holds the tensor that was handed to the step.

The step gets a copy of a boundary's result, unless the result lies in one of its arguments: a step that
writes into the result does not write into the boundary's own memory.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..backends import Kept, Segment, Session
from ..blame import calling_line
from ..errors import CaptureError
from ..memory import Allocate, byte_range, storage_address, tensor_over, unowned_storage
from ..trees import flatten, leaves_of, tensors_in
from .autocast import AutocastState

P = ParamSpec("P")
R = TypeVar("R")


class _Bridge:
    """One buffer, and whether the tensor last handed out over it is still in use."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self._in_use: StorageWeakRef | None = None

    @property
    def free(self) -> bool:
        return self._in_use is None or self._in_use.expired()

    def release(self) -> None:
        self._in_use = None

    def hand_out(self, like: torch.Tensor) -> torch.Tensor:
        alias = self._view(like)
        self._in_use = StorageWeakRef(alias.untyped_storage())
        return alias

    def place_for(self, like: torch.Tensor) -> torch.Tensor:
        return self._view(like)

    def _view(self, like: torch.Tensor) -> torch.Tensor:
        storage = unowned_storage(self.buffer.data_ptr(), self.buffer.nbytes, like.device)
        return tensor_over(storage, like.dtype, like.size(), _dense(like).stride())


class Bridges:
    """The bridges that the graphs of one runner share."""

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._bridges: list[_Bridge] = []

    @property
    def bytes(self) -> int:
        """Bytes of all bridges."""
        return sum(bridge.buffer.nbytes for bridge in self._bridges)

    def contains(self, address: int) -> bool:
        """Whether an address lies in a bridge."""
        ranges = (byte_range(bridge.buffer) for bridge in self._bridges)
        return any(first <= address < last for first, last in ranges)

    def drop(self) -> None:
        """Free them, because no graph uses them any more."""
        self._bridges.clear()

    def begin_graph(self) -> None:
        """All bridges are free for a new graph: no two graphs run at the same time."""
        for bridge in self._bridges:
            bridge.release()

    def take(self, like: torch.Tensor) -> _Bridge:
        """A free bridge with room for a tensor of this geometry."""
        need = max(_dense(like).untyped_storage().nbytes(), like.itemsize)
        fitting = [b for b in self._bridges if b.free and b.buffer.nbytes >= need]
        if fitting:
            return min(fitting, key=lambda bridge: bridge.buffer.nbytes)
        bridge = _Bridge(self._allocate(need))
        self._bridges.append(bridge)
        return bridge


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's geometry with memory for every element, unlike that of an expanded tensor."""
    return torch.empty_like(tensor, device="meta")


class EagerCall:
    """A marked function between two segments, called at every replay."""

    def __init__(
        self, function: Callable[..., Any], kept: Kept, places: Sequence[torch.Tensor | None]
    ) -> None:
        self._function = function
        self._kept = kept
        self._places = places
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._autocast = AutocastState.now()

    def replay(self) -> None:
        """Call the function on the tensors that the previous segment wrote, and update the bridges."""
        if self._arguments is None:
            self._arguments = self._kept.tree
        args, kwargs = self._arguments
        with torch.no_grad(), self._autocast.restored():
            leaves = leaves_of(self._function(*args, **kwargs))
            for place, leaf in zip(self._places, leaves, strict=True):
                if place is not None:
                    self._refresh(place, leaf)

    def _refresh(self, place: torch.Tensor, leaf: Any) -> None:
        if not isinstance(leaf, torch.Tensor) or leaf.shape != place.shape or leaf.dtype != place.dtype:
            name = getattr(self._function, "__qualname__", self._function)
            raise CaptureError(
                f"eager boundary {name} returned {_kind(leaf)}, but {_kind(place)} was captured: results "
                f"must keep their type and shape"
            )
        place.copy_(leaf)


def _kind(value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    return f"{value.dtype} {tuple(value.shape)}" if is_tensor else type(value).__name__


class SegmentedGraph:
    """Captured segments and the eager calls between them, in order. A full graph has one segment."""

    def __init__(self, steps: Sequence[Segment | EagerCall]) -> None:
        self.steps = tuple(steps)
        self.replay: Callable[[], None] = self.steps[0].replay if len(self.steps) == 1 else self._replay_all

    @property
    def boundaries(self) -> int:
        """Eager calls per replay."""
        return sum(isinstance(step, EagerCall) for step in self.steps)

    def _replay_all(self) -> None:
        for step in self.steps:
            step.replay()


class BoundaryCapture:
    """What an active capture does when the step reaches a marked function."""

    def __init__(self, session: Session, bridges: Bridges, *, piecewise: bool) -> None:
        self._session = session
        self._bridges = bridges
        self._piecewise = piecewise
        self._inside = False
        self._calls: list[EagerCall] = []
        bridges.begin_graph()

    def __enter__(self) -> "BoundaryCapture":
        # A full capture breaks nothing and stays unknown: torch.compile guards what marked functions look at.
        _active.capture = self if self._piecewise else None
        return self

    def __exit__(self, *exception: object) -> None:
        _active.capture = None

    @property
    def breaks(self) -> bool:
        return self._piecewise and not self._inside

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Interrupt the recording, call the function, and continue recording after it."""
        self._session.pause()
        kept = self._session.keep((args, kwargs))
        self._inside = True
        try:
            result = function(*args, **kwargs)
        finally:
            self._inside = False
        handed, places = self._bridge(function, result, (args, kwargs))
        self._calls.append(EagerCall(function, kept, places))
        self._session.resume()
        return handed

    def _bridge(self, function: Callable[..., Any], result: Any, given: Any) -> tuple[Any, list[Any]]:
        leaves, structure = flatten(result)
        given_memory = {storage_address(tensor) for tensor in tensors_in(given)}
        handed: list[Any] = []
        places: list[torch.Tensor | None] = []
        for leaf in leaves:
            if leaf is None or (isinstance(leaf, torch.Tensor) and storage_address(leaf) in given_memory):
                handed.append(leaf)  # written in place: its address is that of an argument already
                places.append(None)
            elif isinstance(leaf, torch.Tensor):
                bridge = self._bridges.take(leaf)
                tensor = bridge.hand_out(leaf)
                tensor.copy_(leaf)
                handed.append(tensor)
                places.append(bridge.place_for(leaf))
            else:
                name = getattr(function, "__qualname__", repr(function))
                raise CaptureError(
                    f"eager boundary {name} returned a {type(leaf).__name__}: a replay cannot pass Python "
                    f"values on to the next segment; return tensors or None",
                    where=calling_line(),
                )
        return structure.filled(handed), places

    def assemble(self, segments: Sequence[Segment]) -> SegmentedGraph:
        """Segments and eager calls in the order they run."""
        assert len(segments) == len(self._calls) + 1
        steps: list[Segment | EagerCall] = [segments[0]]
        for call, segment in zip(self._calls, segments[1:], strict=True):
            steps += [call, segment]
        return SegmentedGraph(steps)


class AtBoundaries(Protocol):
    """Decides what happens when the step reaches a marked function."""

    @property
    def breaks(self) -> bool:
        """Whether a marked function met now goes through `call`."""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function in a special way."""


class _Active(threading.local):
    capture: AtBoundaries | None = None


_active = _Active()


@contextmanager
def eager_calls_by(at_boundaries: AtBoundaries) -> Iterator[None]:
    """A context in which this thread's calls of marked functions go through the given object."""
    before, _active.capture = _active.capture, at_boundaries
    try:
        yield
    finally:
        _active.capture = before


def eager_boundary(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that piecewise capture must not record, such as attention.

    Outside of a piecewise capture the mark has no effect: the function is part of the eager step or of the
    full graph. A marked function that another marked function calls is part of that eager call.
    """

    @functools.wraps(function)
    def boundary(*args: P.args, **kwargs: P.kwargs) -> R:
        capture = _active.capture
        if capture is None or not capture.breaks:
            return function(*args, **kwargs)
        return cast(R, capture.call(function, args, kwargs))

    return boundary
