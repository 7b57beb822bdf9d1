"""Which graph a step runs from, and the reason if it runs from none."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..errors import ConfigError
from .descriptor import BatchDescriptor, BatchShape
from .keys import GraphKey
from .mode import Capability, GraphMode, lower, needed_capability

_MAX_REMEMBERED = 4096


class Reason(StrEnum):
    """Why a step runs the way it does. If several apply, the first in this order is reported."""

    EXACT = "exact"  # replayed with no padded token; requests of a mixed batch may be padded
    PADDED = "padded"  # replayed from a larger graph
    DISABLED = "disabled"  # the mode is NONE
    NOT_CAPTURED = "not-captured"  # there is no graph of this kind at all
    LARGER_THAN_MAX = "larger-than-max"  # the batch exceeds every graph of its path
    MIXED_BATCH = "mixed-batch"  # query lengths are mixed and only uniform batches have graphs
    NO_GRAPH_FOR_QUERY_LENGTH = "no-graph-for-query-length"  # uniform, but no graph has its query length
    CASCADE_ATTENTION = "cascade-attention"  # attention runs as a cascade and no full graph does that
    NO_GRAPH_FOR_EXTRA = "no-graph-for-extra"  # no graph has the same opaque part
    NO_GRAPH_FOR_LORA = "no-graph-for-lora"  # no graph serves that many adapters
    NO_GRAPH_FOR_CONTEXT = "no-graph-for-context"  # no graph serves a context that long
    PADDING_DISABLED = "padding-disabled"  # only a padded replay would serve it, and padding is off
    BACKEND_CAPABILITY = "backend-capability"  # the backend cannot capture this path
    CAPTURE_FAILED = "capture-failed"  # the graph for it failed to capture
    OUT_OF_MEMORY = "out-of-memory"  # the graph for it was dropped for lack of memory
    OTHER_RANK = "other-rank"  # the graph for it was dropped: another rank could not capture it
    AUTOCAST_CHANGED = "autocast-changed"  # the autocast state differs from that of the capture
    TRAINING_MODE_CHANGED = "training-mode-changed"  # train() or eval() was called since the capture
    ATTRIBUTE_CHANGED = "attribute-changed"  # one that the step reads has changed since the capture
    FIRST_CALL = "first-call"  # arguments of this kind were seen for the first time
    WRITTEN_ARGUMENT = "written-argument"  # a graph cannot copy back what the step writes
    OPAQUE_ARGUMENT = "opaque-argument"  # an argument cannot be compared with the captured one
    EMPTY_BATCH = "empty-batch"  # the call has no rows
    IN_FLIGHT = "in-flight"  # earlier calls of a part wait for their backward in the memory it would use
    TRANSFORMED = "inside-transform"  # called inside torch.func.vmap, grad or the like
    UNSEEN_SIGNATURE = "unseen-signature"  # arguments are of a different kind than the captured ones


_RANK = {reason: rank for rank, reason in enumerate(Reason)}


@dataclass(frozen=True, slots=True)
class Decision:
    """How one step runs."""

    mode: GraphMode
    """NONE (eager), PIECEWISE or FULL."""
    descriptor: BatchDescriptor | None
    """The graph to replay; None when eager."""
    reason: Reason
    """`exact` or `padded` for a replay, otherwise why the step is eager."""
    why_not_full: Reason | None = None
    """Why a step runs PIECEWISE although FULL was requested for its path."""

    @property
    def is_eager(self) -> bool:
        """Whether the step runs without a graph."""
        return self.mode is GraphMode.NONE


class Dispatcher:
    """Chooses the graph that serves a step, before anything is written.

    FULL takes precedence over PIECEWISE, and PIECEWISE over eager. Of the graphs of one mode that can serve a
    batch, the first in the order of descriptors is used: fewest tokens, then adapters, then context, uniform
    before mixed.

    The decode path is for uniform batches with `query_len` tokens per request, or with any other length for
    which a uniform graph was added (even if it has been lost since). All other batches take the mixed path.
    """

    def __init__(
        self,
        mode: GraphMode | str,
        *,
        capability: Capability = Capability.ALWAYS,
        query_len: int = 1,
        padding: bool = True,
    ) -> None:
        self.requested = GraphMode.parse(mode)
        """The requested mode."""
        possible = lower(self.requested, capability, query_len)
        self.mode = possible.mode
        """The mode after the backend's capability has lowered it."""
        self.lowered = possible.explanation
        """What was lowered and why; None if nothing was."""
        self._capability = capability
        self.pads = padding
        """Whether a batch may run from the graph of a larger size."""
        self.live: list[GraphKey] = []
        """The graphs in use, cheapest first."""
        self._lost: dict[GraphKey, Reason] = {}
        self._decode_lengths = {query_len}
        # All contexts between two neighbours here get the same decision, so a growing context keeps its own.
        self._context_bounds: list[int] = []
        self.version = 0
        """Changes with the set of graphs; decisions of earlier versions are invalid."""
        self._remembered: dict[tuple[Any, ...], Decision] = {}

    def check(self, key: GraphKey) -> None:
        """Raise ConfigError for a graph that no batch could ever use. Call it before capturing."""
        mode, descriptor = key
        if mode is GraphMode.FULL:
            if self.mode.decode is not GraphMode.FULL:
                raise ConfigError(
                    f"mode {self.mode.name} uses no full graphs, but one for {descriptor} was given"
                )
            if self._capability < needed_capability(descriptor.query_len):
                raise ConfigError(
                    f"capability {self._capability.name} does not allow a full graph for {descriptor}"
                )
        elif mode is GraphMode.PIECEWISE:
            if self.mode.mixed is not GraphMode.PIECEWISE:
                raise ConfigError(
                    f"mode {self.mode.name} uses no piecewise graphs, but one for {descriptor} was given"
                )
            if descriptor.query_len is not None or descriptor.context is not None or descriptor.cascade:
                raise ConfigError(
                    f"a piecewise graph serves any query length, context and attention, and cannot be "
                    f"limited to {descriptor}"
                )
        else:
            raise ConfigError(f"the mode of a graph must be FULL or PIECEWISE, not {mode.name}")

    def add(self, key: GraphKey) -> None:
        """Use a captured graph for batches from now on."""
        self._admit(key)
        self._lost.pop(key, None)
        if key not in self.live:
            insort(self.live, key, key=_price)

    def mark_failed(self, key: GraphKey, reason: Reason) -> None:
        """Record that this graph is missing and why, whether or not it was added before."""
        if reason in (Reason.EXACT, Reason.PADDED):
            raise ConfigError(f"{reason} does not explain why a graph is missing")
        self._admit(key)
        if key in self.live:
            self.live.remove(key)
        self._lost[key] = reason

    def decide(self, shape: BatchShape) -> Decision:
        """How a step of this shape runs. Decisions are cached."""
        known = (
            shape.num_tokens,
            shape.num_reqs,
            shape.query_len,
            shape.lora,
            shape.cascade,
            bisect_left(self._context_bounds, shape.context),
            shape.extra,
        )
        decision = self._remembered.get(known)
        if decision is None:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            decision = self._remembered[known] = self._decide(shape)
        return decision

    def _decide(self, shape: BatchShape) -> Decision:
        is_decode = shape.query_len in self._decode_lengths
        wanted = self.requested.decode if is_decode else self.requested.mixed
        path = self.mode.decode if is_decode else self.mode.mixed
        if path is GraphMode.NONE:
            why = Reason.BACKEND_CAPABILITY if wanted is not GraphMode.NONE else _other_length(shape)
            disabled = self.requested is GraphMode.NONE
            return Decision(GraphMode.NONE, None, Reason.DISABLED if disabled else why)
        # A FULL path whose graph is missing may use the piecewise graphs of the mixed path.
        modes = [GraphMode.FULL] if path is GraphMode.FULL else []
        modes += [GraphMode.PIECEWISE] if self.mode.mixed is GraphMode.PIECEWISE else []
        # Keys begin with their tokens: those before here are all too small.
        large_enough = self.live[bisect_left(self.live, (shape.num_tokens,), key=_price) :]
        for mode in modes:
            found = next((key.descriptor for key in large_enough if self._serves(key, mode, shape)), None)
            if found is None:
                continue
            reason = Reason.EXACT if found.num_tokens == shape.num_tokens else Reason.PADDED
            why_not_full = None
            if mode is not GraphMode.FULL and wanted is GraphMode.FULL:
                lowered = path is not GraphMode.FULL
                why_not_full = Reason.BACKEND_CAPABILITY if lowered else self._cause([GraphMode.FULL], shape)
            return Decision(mode, found, reason, why_not_full)
        return Decision(GraphMode.NONE, None, self._cause(modes, shape))

    def _serves(self, key: GraphKey, mode: GraphMode, shape: BatchShape) -> bool:
        return key.mode is mode and next(self._obstacles(key, shape), None) is None

    def _obstacles(self, key: GraphKey, shape: BatchShape) -> Iterator[Reason]:
        """The obstacles between a batch and this graph; none: the graph serves it."""
        mode, graph = key
        if graph.num_tokens < shape.num_tokens or graph.num_reqs < shape.num_reqs:
            yield Reason.LARGER_THAN_MAX
        if mode is GraphMode.FULL:
            # A graph for mixed lengths serves uniform batches as well, never the reverse.
            if graph.query_len is not None and graph.query_len != shape.query_len:
                yield _other_length(shape)
            if graph.cascade != shape.cascade:
                # To need no cascade is nothing that a batch could do without.
                yield Reason.CASCADE_ATTENTION if shape.cascade else Reason.NOT_CAPTURED
        if graph.extra != shape.extra:
            yield Reason.NO_GRAPH_FOR_EXTRA
        if graph.lora < shape.lora:
            yield Reason.NO_GRAPH_FOR_LORA
        # Attention, which alone depends on the context, is outside of a piecewise graph.
        if mode is GraphMode.FULL and graph.context is not None and graph.context < shape.context:
            yield Reason.NO_GRAPH_FOR_CONTEXT
        if not self.pads and graph.num_tokens != shape.num_tokens:
            yield Reason.PADDING_DISABLED

    def _cause(self, modes: list[GraphMode], shape: BatchShape) -> Reason:
        """Why no live graph of these modes serves a batch: the most specific cause that applies.

        That is a lost graph that would have served it, otherwise what rules out the nearest graph.
        """
        for mode in modes:
            gone = [key for key in self._lost if self._serves(key, mode, shape)]
            if gone:
                return self._lost[min(gone, key=_price)]
        between = [tuple(self._obstacles(key, shape)) for key in self.live if key.mode in modes]
        nearest = min(between, key=_distance, default=(Reason.NOT_CAPTURED,))
        return min(nearest, key=_RANK.__getitem__)

    def _admit(self, key: GraphKey) -> None:
        self.check(key)
        descriptor = key.descriptor
        if descriptor.query_len is not None:
            self._decode_lengths.add(descriptor.query_len)
        if descriptor.context is not None and descriptor.context not in self._context_bounds:
            insort(self._context_bounds, descriptor.context)
        self.version += 1
        self._remembered.clear()


def _price(key: GraphKey) -> tuple[Any, ...]:
    return key.descriptor.sort_key


def _other_length(shape: BatchShape) -> Reason:
    return Reason.MIXED_BATCH if shape.query_len is None else Reason.NO_GRAPH_FOR_QUERY_LENGTH


def _distance(obstacles: tuple[Reason, ...]) -> tuple[Any, ...]:
    """How far a graph is from serving a batch.

    Graphs for another kind of step are the farthest, then those for another query length, then those that are
    too small. Graphs with other obstacles only are nearer: the fewer obstacles the nearer, and with equally
    many, those that come first in `Reason` are nearer.
    """
    return (
        Reason.NOT_CAPTURED in obstacles,
        Reason.MIXED_BATCH in obstacles or Reason.NO_GRAPH_FOR_QUERY_LENGTH in obstacles,
        Reason.LARGER_THAN_MAX in obstacles,
        len(obstacles),
        sorted(_RANK[reason] for reason in obstacles),
    )
