"""Records a step, and keeps the result."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..blame import frames_of
from ..dispatching.descriptor import BatchDescriptor, BatchShape
from ..dispatching.keys import GraphKey
from ..errors import CaptureError, OstinatoError
from ..forbidden import Forbidden
from ..known_calls import explained
from ..memory import Allocate, tensor_over
from ..options import CaptureOptions
from ..trees import Maker, flatten, leaves_of, map_tensors
from .autocast import clean_autocast_cache
from .gate import recording
from .pool import GraphPool, Lent
from .segments import BoundaryCapture, Bridges, SegmentedGraph


class UnnamedCallError(CaptureError):
    """The device refused to capture something, and only says that it did."""


@dataclass(frozen=True)
class Recorded:
    """A recorded step: the work, its result, and what it cost."""

    graph: SegmentedGraph
    output: Any
    nodes: int | None
    bytes: int
    seconds: float
    raw: Any


class Ongoing:
    """A recording in progress."""

    def __init__(self) -> None:
        self.output: Any = None
        """Holds the results that replays must find; set it before the recording ends."""
        self.recorded: Recorded | None = None
        """Holds the recording once it has ended."""


@contextmanager
def being_recorded(
    pool: GraphPool, options: CaptureOptions, bridges: Bridges, *, piecewise: bool, with_grad: bool
) -> Iterator[Ongoing]:
    """Record what is done in this context into the pool. The only place where anything is captured.

    `with_grad`: leave it to the caller whether autograd takes notes.
    """
    grad_enabled = with_grad and torch.is_grad_enabled()
    with (
        recording(),
        torch.inference_mode(False),
        torch.set_grad_enabled(grad_enabled),
        clean_autocast_cache(),
    ):
        bytes_before = pool.bytes
        started = time.perf_counter()
        session = pool.backend.session(pool.memory, options)
        ongoing = Ongoing()
        try:
            session.begin()
            with BoundaryCapture(session, bridges, piecewise=piecewise) as boundaries:
                yield ongoing
            kept = session.keep(ongoing.output)
            ongoing.output = None
            finished = session.finish()
        except BaseException as error:
            session.abort()
            if _is_capture_violation(error):
                raise _explained(error) from error
            raise
        pool.overwrite()  # recording may have written over outputs in the pool
        ongoing.recorded = Recorded(
            graph=boundaries.assemble(finished.segments),
            output=kept.tree,
            nodes=finished.nodes,
            bytes=max(0, pool.bytes - bytes_before),
            seconds=time.perf_counter() - started,
            raw=finished.raw,
        )


def record(
    step: Callable[[], Any], pool: GraphPool, options: CaptureOptions, bridges: Bridges, *, piecewise: bool
) -> Recorded:
    """Record one call of `step` into the pool."""
    with being_recorded(pool, options, bridges, piecewise=piecewise, with_grad=False) as ongoing:
        ongoing.output = step()
    assert ongoing.recorded is not None
    return ongoing.recorded


def with_outputs_of_their_own(
    step: Callable[..., Any], like: Any, allocate: Allocate
) -> tuple[Callable[..., Any], Any]:
    """The step followed by a copy of its results to memory that no graph of the pool uses, and that memory.

    Keeping a result in the pool is not enough: a graph captured earlier may use the same memory for its
    intermediates.
    """

    def place_for(tensor: torch.Tensor) -> torch.Tensor:
        shape = torch.empty_like(tensor, device="meta")
        memory = allocate(shape.untyped_storage().nbytes()).untyped_storage()
        return tensor_over(memory, tensor.dtype, shape.shape, shape.stride())

    places = map_tensors(place_for, like)

    def copying(**inputs: torch.Tensor) -> Any:
        for place, leaf in zip(leaves_of(places), leaves_of(step(**inputs)), strict=True):
            if isinstance(leaf, torch.Tensor):
                place.copy_(leaf)
        return places

    return copying, places


def _is_capture_violation(error: BaseException) -> bool:
    if isinstance(error, OstinatoError | torch.OutOfMemoryError) or not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return "fail_on_recompile" in text or ("CUDA" in text and "captur" in text)


def _explained(error: BaseException) -> CaptureError:
    """The error for something that recording forbids, with the user's line."""
    frames = frames_of(error.__traceback__)
    unnamed = Forbidden("", "")
    found, blame = explained(unnamed, frames)
    if "fail_on_recompile" in str(error):
        told = f"torch.compile compiled something during recording: {error}"
        return CaptureError(told, where=blame.line, inside=blame.inside)
    first_line = str(error).splitlines()[0]
    if "unjoined" in first_line:
        return CaptureError(
            "the step forked to a side stream and did not join it: let the current stream wait for it "
            "(wait_stream) before the step ends",
            where=blame.line,
        )
    if "legacy stream" in first_line:
        return CaptureError(
            f"something runs on the default stream, which cannot be captured ({first_line}): use the current "
            f"stream, or one of your own that waits for it (wait_stream), and hold no earlier "
            f"result with its autograd graph",
            where=blame.line,
            inside=blame.inside,
        )
    if found is not unnamed:
        return CaptureError(str(found), where=blame.line, inside=blame.inside)
    return UnnamedCallError(
        f"not allowed while a graph is recorded: {first_line}. Reading a value in Python, a data-dependent "
        f"shape or a copy to the host cannot be captured; do it before or after the step",
        where=blame.line,
        inside=blame.inside,
    )


class CapturedGraph:
    """The graph of one key, its output and its counters."""

    def __init__(self, key: GraphKey, recorded: Recorded, seconds: float) -> None:
        """`seconds`: the duration of the capture, including warm-ups."""
        self.key = key
        self.recorded = recorded
        self.seconds = seconds
        self.replays = 0
        self.real_tokens = 0
        self.lent = Lent()
        """Results in memory that only this graph's next replay overwrites."""
        self.replay = recorded.graph.replay
        self.leaves, self.structure = flatten(recorded.output)
        self._is_bare = isinstance(recorded.output, torch.Tensor)
        self._maker: Maker | None = None

    @property
    def descriptor(self) -> BatchDescriptor:
        """What the graph serves."""
        return self.key.descriptor

    @property
    def raw(self) -> Any:
        """The raw graphs, one per segment, if `CaptureOptions.keep_graph` asked for them."""
        return self.recorded.raw

    @property
    def padding_waste(self) -> float:
        """Fraction of replayed token rows that were padding."""
        total = self.replays * self.descriptor.num_tokens
        return 1 - self.real_tokens / total if total else 0.0

    def trimmed(
        self, shape: BatchShape, trim: Callable[[int, torch.Tensor, BatchShape], torch.Tensor]
    ) -> list[Any]:
        """The flattened output without padded rows, at its unchanging address."""
        return [
            trim(position, leaf, shape) if isinstance(leaf, torch.Tensor) else leaf
            for position, leaf in enumerate(self.leaves)
        ]

    def handed_out(self, leaves: list[Any]) -> Any:
        """Output leaves in the structure that the step returned, in new containers and tensors, so that the
        caller may change them in any way; only the memory is shared."""
        return self.structured([leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])

    def structured(self, leaves: list[Any]) -> Any:
        """Leaves in the structure that the step returned."""
        if self._is_bare:
            return leaves[0]
        if self._maker is None:
            self._maker = Maker(self.structure, self.leaves)
        return self._maker.made(leaves)
