"""Which graph a step runs from, and the reason when it runs from none."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import Any

from ..errors import ConfigError
from .descriptor import BatchDescriptor, BatchShape
from .graph_index import Cost, Index, Need
from .keys import GraphKey
from .mode import Capability, GraphMode, lower, needed_capability

_MAX_REMEMBERED = 4096


class Reason(StrEnum):
    """Why a step runs the way it does."""

    EXACT = "exact"
    """Replayed with no padded token. Requests of a mixed batch may be padded: they have no tokens."""
    PADDED = "padded"
    """Replayed from a larger graph."""
    DISABLED = "disabled"
    """The mode is NONE."""
    NOT_CAPTURED = "not-captured"
    """There is no graph of this kind at all."""
    LARGER_THAN_MAX = "larger-than-max"
    """The batch exceeds every graph of its path."""
    MIXED_BATCH = "mixed-batch"
    """Query lengths are mixed and only uniform batches have graphs."""
    NO_GRAPH_FOR_LORA = "no-graph-for-lora"
    """No graph serves as many adapters."""
    NO_GRAPH_FOR_QUERY_LENGTH = "no-graph-for-query-length"
    """The batch is uniform, but in a query length that has no graph."""
    NO_GRAPH_FOR_CONTEXT = "no-graph-for-context"
    """No graph serves as long a context."""
    CASCADE_ATTENTION = "cascade-attention"
    """Cascade attention is in no full graph."""
    ENCODER_STEP = "encoder-step"
    """The step runs the encoder and no graph does."""
    CAPTURE_FAILED = "capture-failed"
    """The graph for it failed to capture."""
    OUT_OF_MEMORY = "out-of-memory"
    """The graph for it was shed for want of memory."""
    BACKEND_CAPABILITY = "backend-capability"
    """The backend cannot capture this path."""
    PADDING_DISABLED = "padding-disabled"
    """Only a padded replay would serve it, and padding is off."""
    AUTOCAST_CHANGED = "autocast-changed"
    """The autocast state differs from that of the capture."""
    TRAINING_MODE_CHANGED = "training-mode-changed"
    """train() or eval() was called since the capture."""
    UNSEEN_SIGNATURE = "unseen-signature"
    """Arguments of another kind than those captured."""

    @property
    def is_replay(self) -> bool:
        """Whether it is said of a replay; all others are causes."""
        return self in (Reason.EXACT, Reason.PADDED)


@dataclass(frozen=True, slots=True)
class Decision:
    """How one step runs."""

    mode: GraphMode
    """NONE (eager), PIECEWISE or FULL."""
    descriptor: BatchDescriptor | None
    """The graph to replay; None when eager."""
    reason: Reason
    """`exact` or `padded` for a replay, else why the step is eager."""
    why_not_full: Reason | None = None
    """Why a PIECEWISE step is not FULL, where its path was asked to be."""

    @property
    def is_eager(self) -> bool:
        """Whether the step runs without a graph."""
        return self.mode is GraphMode.NONE


# What may keep a batch from a graph that is large enough: the field, and its value once it is dropped.
# When several do, the first is named.
_REQUIREMENTS: tuple[tuple[Reason, str, Any], ...] = (
    (Reason.CASCADE_ATTENTION, "cascade", False),
    (Reason.ENCODER_STEP, "encoder", None),
    (Reason.NO_GRAPH_FOR_LORA, "lora", 0),
    (Reason.NO_GRAPH_FOR_CONTEXT, "context", 0),
    (Reason.PADDING_DISABLED, "exact", False),
)


class Dispatcher:
    """Chooses, for every step and before anything is written, the graph that serves it.

    FULL goes before PIECEWISE, and PIECEWISE before eager. Among the graphs of one mode that can serve a
    batch the one of least `cost` is taken; equal costs and a missing `cost` fall back on the order of
    descriptors: fewest tokens, adapters, context, uniform before mixed. `cost` is asked once for every
    graph, at the first decision after the set of graphs has changed.

    The decode path is for uniform batches of `query_len` tokens, or of any other length that was given a
    uniform graph (even if that was lost since); all other batches take the mixed path.
    """

    def __init__(
        self,
        mode: GraphMode | str,
        *,
        capability: Capability = Capability.ALWAYS,
        query_len: int = 1,
        padding: bool = True,
        cost: Cost | None = None,
        piecewise_available: bool = True,
    ) -> None:
        self.requested = GraphMode.parse(mode)
        """The mode that was asked for."""
        possible = lower(self.requested, capability, query_len, piecewise_available)
        self.mode = possible.mode
        """The mode after the backend's capability has lowered it."""
        self.lowered = possible.explanation
        """What was lowered and why; None when nothing was."""
        self._capability = capability
        self._padding = padding
        self._cost = cost
        self._live: dict[GraphKey, None] = {}
        self._lost: dict[GraphKey, Reason] = {}
        self._decode_lengths = {query_len}
        # Contexts between two neighbours here decide alike: a growing context keeps its remembered decision.
        self._context_bounds: list[int] = []
        self.version = 0
        """Changes whenever the set of graphs does; decisions of an earlier version are void."""
        self._remembered: dict[tuple[Any, ...], Decision] = {}
        self._indexes: tuple[Index, Index] | None = None

    def check(self, key: GraphKey) -> None:
        """Refuse a graph that no batch could ever use: worth asking before it is captured."""
        mode, descriptor = key
        if mode is GraphMode.FULL:
            if self.mode.decode is not GraphMode.FULL:
                raise ConfigError(f"{self.mode.name} uses no full graphs: {descriptor}")
            if self._capability < needed_capability(descriptor.query_len):
                raise ConfigError(f"{self._capability.name} does not allow a full graph for {descriptor}")
        elif mode is GraphMode.PIECEWISE:
            if self.mode.mixed is not GraphMode.PIECEWISE:
                raise ConfigError(f"{self.mode.name} uses no piecewise graphs: {descriptor}")
            if descriptor.query_len is not None or descriptor.context is not None:
                raise ConfigError(
                    f"a piecewise graph serves any query length and context, not only {descriptor}"
                )
        else:
            raise ConfigError(f"a graph is FULL or PIECEWISE, not {mode.name}")

    def add(self, key: GraphKey) -> None:
        """Let a captured graph serve batches."""
        self._admit(key)
        self._lost.pop(key, None)
        self._live[key] = None

    def remove(self, key: GraphKey, reason: Reason) -> None:
        """Stop using a graph; batches that only it could serve report `reason` from now on."""
        if key not in self._live:
            raise ConfigError(f"there is no {key.mode} graph for {key.descriptor} to remove")
        self.mark_failed(key, reason)

    def mark_failed(self, key: GraphKey, reason: Reason) -> None:
        """Remember that this graph is missing, added before or not, and why."""
        if reason.is_replay:
            raise ConfigError(f"{reason} does not say why a graph is missing")
        self._admit(key)
        self._live.pop(key, None)
        self._lost[key] = reason

    def keys(self) -> tuple[GraphKey, ...]:
        """The graphs in use, in the order they were added."""
        return tuple(self._live)

    def decide(self, shape: BatchShape) -> Decision:
        """How a step of this shape runs. Repeated shapes are answered from memory."""
        known = (
            shape.num_tokens,
            shape.num_reqs,
            shape.query_len,
            shape.lora,
            shape.cascade,
            shape.encoder,
            bisect_left(self._context_bounds, shape.context),
        )
        decision = self._remembered.get(known)
        if decision is None:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            decision = self._remembered[known] = self._decide(shape)
        return decision

    def _decide(self, shape: BatchShape) -> Decision:
        wanted, path = self._paths(shape)
        if path is GraphMode.NONE:
            return Decision(GraphMode.NONE, None, self._why_no_path(shape, wanted))
        need = Need(
            shape.num_tokens,
            shape.num_reqs,
            shape.query_len,
            shape.lora,
            shape.context,
            shape.encoder,
            shape.cascade,
            not self._padding,
        )
        live, lost = self._indexed()
        # A FULL path whose graph is missing may use the piecewise graphs of the mixed path.
        modes = [GraphMode.FULL] if path is GraphMode.FULL else []
        modes += [GraphMode.PIECEWISE] if self.mode.mixed is GraphMode.PIECEWISE else []
        for mode in modes:
            found = live.cheapest(mode, need)
            if found is None:
                continue
            reason = Reason.EXACT if found.num_tokens == shape.num_tokens else Reason.PADDED
            why_not_full = None
            if mode is not GraphMode.FULL and wanted is GraphMode.FULL:
                lowered = path is not GraphMode.FULL
                why_not_full = (
                    Reason.BACKEND_CAPABILITY if lowered else self._cause(live, lost, [GraphMode.FULL], need)
                )
            return Decision(mode, found, reason, why_not_full)
        return Decision(GraphMode.NONE, None, self._cause(live, lost, modes, need))

    def _paths(self, shape: BatchShape) -> tuple[GraphMode, GraphMode]:
        """What this shape was asked to run as, and what it can run as at best."""
        if shape.query_len in self._decode_lengths:
            return self.requested.decode, self.mode.decode
        return self.requested.mixed, self.mode.mixed

    def _why_no_path(self, shape: BatchShape, wanted: GraphMode) -> Reason:
        if self.requested is GraphMode.NONE:
            return Reason.DISABLED
        if wanted is not GraphMode.NONE:
            return Reason.BACKEND_CAPABILITY
        return Reason.MIXED_BATCH if shape.query_len is None else Reason.NO_GRAPH_FOR_QUERY_LENGTH

    def _cause(self, live: Index, lost: Index, modes: list[GraphMode], need: Need) -> Reason:
        """Why no live graph of these modes serves a batch: the most specific cause that is true.

        A lost graph that would have served it; else the smallest set of requirements without which a
        graph serves it, by its first member; else its size; else its query length.
        """

        def found(eased: Need, *, any_length: bool = False) -> bool:
            return any(live.cheapest(mode, eased, any_length=any_length) for mode in modes)

        for mode in modes:
            gone = lost.cheapest(mode, need)
            if gone is not None:
                return self._lost[GraphKey(mode, gone)]
        in_force = [requirement for requirement in _REQUIREMENTS if getattr(need, requirement[1])]
        eased = need
        for how_many in range(1, len(in_force) + 1):
            for dropped in combinations(in_force, how_many):
                eased = need._replace(**{field: without for _, field, without in dropped})
                if found(eased):
                    return dropped[0][0]
        # Every requirement is dropped in `eased` now; in `tiny` that of the size as well.
        tiny = eased._replace(tokens=0, reqs=0)
        if found(tiny):
            return Reason.LARGER_THAN_MAX
        if found(eased, any_length=True):
            return Reason.MIXED_BATCH if need.query_len is None else Reason.NO_GRAPH_FOR_QUERY_LENGTH
        return Reason.LARGER_THAN_MAX if found(tiny, any_length=True) else Reason.NOT_CAPTURED

    def _admit(self, key: GraphKey) -> None:
        self.check(key)
        descriptor = key.descriptor
        if descriptor.query_len is not None:
            self._decode_lengths.add(descriptor.query_len)
        if descriptor.context is not None and descriptor.context not in self._context_bounds:
            insort(self._context_bounds, descriptor.context)
        self.version += 1
        self._remembered.clear()
        self._indexes = None

    def _indexed(self) -> tuple[Index, Index]:
        if self._indexes is None:
            # A lost graph was perhaps never measured: its cost is not asked for.
            self._indexes = Index(self._live, self._cost), Index(self._lost, None)
        return self._indexes
