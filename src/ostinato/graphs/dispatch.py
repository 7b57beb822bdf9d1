"""Which graph a step runs from, and the reason when it runs from none."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import Any, NamedTuple

from .descriptor import BatchDescriptor, BatchShape
from .errors import ConfigError
from .ladder import Ladder
from .mode import Capability, GraphMode, lower, needed_capability

_MAX_REMEMBERED = 4096


class Reason(StrEnum):
    """Why a step runs the way it does."""

    EXACT = "exact"
    """Replayed, nothing padded."""
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


class GraphKey(NamedTuple):
    """One graph: FULL or PIECEWISE, and the batches it serves."""

    mode: GraphMode
    descriptor: BatchDescriptor


Key = GraphKey


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


Cost = Callable[[GraphMode, BatchDescriptor], float]
"""What one replay costs, for instance in measured milliseconds."""


def capture_keys(
    mode: GraphMode,
    decode_ladder: Ladder | None,
    token_ladder: Ladder | None,
    *,
    query_len: int = 1,
    max_reqs: int,
    lora_cases: Sequence[int] = (0,),
    context_buckets: Sequence[int | None] = (None,),
) -> list[GraphKey]:
    """The graphs to capture for a mode, the largest first.

    `decode_ladder` counts requests (of `query_len` tokens each) and is needed where the decode path is
    FULL; `token_ladder` counts tokens and is needed by every other graph. Piecewise graphs serve both
    paths and any context, so they are listed once.
    """
    if max_reqs < 1:
        raise ConfigError(f"max_reqs must be at least 1, not {max_reqs}")
    for name, cases in (("lora_cases", lora_cases), ("context_buckets", context_buckets)):
        if not cases or len(set(cases)) != len(cases):
            raise ConfigError(f"{name} must list at least one case and none twice, not {list(cases)}")
    keys: list[GraphKey] = []
    if mode.decode is GraphMode.FULL:
        if decode_ladder is None:
            raise ConfigError(f"{mode.name} captures decode batches and needs a decode ladder")
        if decode_ladder.limit > max_reqs:
            raise ConfigError(
                f"the decode ladder reaches {decode_ladder.limit} requests and there are never more than "
                f"{max_reqs}; cut it with up_to({max_reqs})"
            )
        keys += [
            GraphKey(GraphMode.FULL, BatchDescriptor.decode(num_reqs, query_len, lora=lora, context=context))
            for num_reqs in decode_ladder
            for lora in lora_cases
            for context in context_buckets
        ]
    if mode.mixed is not GraphMode.NONE:
        if token_ladder is None:
            raise ConfigError(f"{mode.name} captures mixed batches and needs a token ladder")
        keys += [
            GraphKey(
                mode.mixed, BatchDescriptor(num_tokens, min(num_tokens, max_reqs), lora=lora, context=context)
            )
            for num_tokens in token_ladder
            for lora in lora_cases
            for context in (context_buckets if mode.mixed is GraphMode.FULL else (None,))
        ]
    return sorted(keys, key=_capture_order)


def _capture_order(key: GraphKey) -> tuple[Any, ...]:
    dearest_first = tuple(-part for part in key.descriptor.sort_key)
    return (dearest_first[0], key.mode is not GraphMode.FULL, *dearest_first[1:])


class _Need(NamedTuple):
    """A shape as the search sees it. Unlike a shape it can drop a requirement, even that of its size."""

    tokens: int
    reqs: int
    query_len: int | None
    lora: int
    context: int
    encoder: bool | None
    cascade: bool
    exact: bool


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
        mode: GraphMode,
        *,
        capability: Capability = Capability.ALWAYS,
        query_len: int = 1,
        padding: bool = True,
        cost: Cost | None = None,
        piecewise_available: bool = True,
    ) -> None:
        self.requested = mode
        """The mode that was asked for."""
        possible = lower(mode, capability, query_len, piecewise_available)
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
        # Contexts between two neighbours here decide alike, so remembered decisions survive its growth.
        self._context_bounds: list[int] = []
        self._remembered: dict[tuple[Any, ...], Decision] = {}
        self._indexes: tuple[_Index, _Index] | None = None

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
        need = _Need(
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

    def _cause(self, live: _Index, lost: _Index, modes: list[GraphMode], need: _Need) -> Reason:
        """Why no live graph of these modes serves a batch: the most specific cause that is true.

        A lost graph that would have served it; else the smallest set of requirements without which a
        graph serves it, by its first member; else its size; else its query length.
        """

        def found(eased: _Need, *, any_length: bool = False) -> bool:
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
        """Refuse a graph that no batch could ever use, take note of the rest."""
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
        if descriptor.query_len is not None:
            self._decode_lengths.add(descriptor.query_len)
        if descriptor.context is not None and descriptor.context not in self._context_bounds:
            insort(self._context_bounds, descriptor.context)
        self._remembered.clear()
        self._indexes = None

    def _indexed(self) -> tuple[_Index, _Index]:
        if self._indexes is None:
            # A lost graph was perhaps never measured: its cost is not asked for.
            self._indexes = _Index(self._live, self._cost), _Index(self._lost, None)
        return self._indexes


_Priced = tuple[tuple[Any, ...], BatchDescriptor]


class _Chain:
    """Graphs of growing tokens and requests: those that hold a batch are a suffix, its cheapest is known."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reqs: list[int] = []
        self.priced: list[_Priced] = []

    def seal(self) -> None:
        """Work out the cheapest of every suffix, and of every suffix within one number of tokens."""
        self.cheapest_from = list(self.priced)
        self.cheapest_exact_from = list(self.priced)
        for i in range(len(self.priced) - 2, -1, -1):
            self.cheapest_from[i] = min(self.priced[i], self.cheapest_from[i + 1])
            if self.tokens[i] == self.tokens[i + 1]:
                self.cheapest_exact_from[i] = min(self.priced[i], self.cheapest_exact_from[i + 1])

    def cheapest(self, need: _Need) -> _Priced | None:
        at = max(bisect_left(self.tokens, need.tokens), bisect_left(self.reqs, need.reqs))
        if at == len(self.tokens):
            return None
        if not need.exact:
            return self.cheapest_from[at]
        return self.cheapest_exact_from[at] if self.tokens[at] == need.tokens else None


class _Bucket:
    """Graphs of one mode that differ in tokens and requests only."""

    def __init__(self, lora: int, context: int | None, encoder: bool, priced: list[_Priced]) -> None:
        self.lora = lora
        self.context = math.inf if context is None else context
        self.encoder = encoder
        self.chains = _chains(priced)

    def serves(self, need: _Need) -> bool:
        return (
            self.lora >= need.lora
            and self.context >= need.context
            and (need.encoder is None or self.encoder == need.encoder)
        )


def _chains(priced: list[_Priced]) -> list[_Chain]:
    """As few chains as possible: one for any ladder, more only where more tokens come with fewer requests."""
    chains: list[_Chain] = []
    for entry in sorted(priced, key=lambda entry: (entry[1].num_tokens, entry[1].num_reqs)):
        descriptor = entry[1]
        # Chains stay sorted by falling last requests, so the first that fits is the tightest.
        for chain in chains:
            if chain.reqs[-1] <= descriptor.num_reqs:
                break
        else:
            chain = _Chain()
            chains.append(chain)
        chain.tokens.append(descriptor.num_tokens)
        chain.reqs.append(descriptor.num_reqs)
        chain.priced.append(entry)
    for chain in chains:
        chain.seal()
    return chains


class _Index:
    """Graphs arranged so that the cheapest one for a batch is found without a look at all of them."""

    def __init__(self, keys: Iterable[GraphKey], cost: Cost | None) -> None:
        alike: defaultdict[tuple[Any, ...], list[_Priced]] = defaultdict(list)
        for mode, descriptor in keys:
            price = _price(cost, mode, descriptor)
            alike[mode, descriptor.query_len, descriptor.lora, descriptor.context, descriptor.encoder].append(
                (price, descriptor)
            )
        self._families: defaultdict[tuple[GraphMode, int | None], list[_Bucket]] = defaultdict(list)
        for (mode, query_len, lora, context, encoder), priced in alike.items():
            self._families[mode, query_len].append(_Bucket(lora, context, encoder, priced))

    def cheapest(self, mode: GraphMode, need: _Need, *, any_length: bool = False) -> BatchDescriptor | None:
        """The cheapest graph that serves a batch; with `any_length`, as if query lengths did not matter."""
        if mode is GraphMode.FULL and need.cascade:
            return None
        if any_length:
            families = [family for family in self._families if family[0] is mode]
        else:
            # A piecewise graph and a full one for mixed lengths serve uniform batches as well.
            families = [(mode, query_len) for query_len in {need.query_len, None}]
        candidates = [
            candidate
            for family in families
            for bucket in self._families.get(family, ())
            if bucket.serves(need)
            for chain in bucket.chains
            if (candidate := chain.cheapest(need)) is not None
        ]
        return min(candidates)[1] if candidates else None


def _price(cost: Cost | None, mode: GraphMode, descriptor: BatchDescriptor) -> tuple[Any, ...]:
    # The sort key tells any two descriptors apart, so prices never tie.
    if cost is None:
        return descriptor.sort_key
    price = cost(mode, descriptor)
    if math.isnan(price):
        raise ConfigError(f"the cost of the {mode} graph for {descriptor} is not a number")
    return (price, *descriptor.sort_key)
