"""The dispatcher against a slow, plain reference."""

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest
from dispatched_graphs import (
    FULL,
    FULL_AND_PIECEWISE,
    FULL_DECODE_ONLY,
    NONE,
    PIECEWISE,
    dispatcher,
    eager,
    full,
    full_mixed,
    piecewise,
    replay,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.graphs.dispatching.descriptor import BatchDescriptor, BatchShape
from ostinato.graphs.dispatching.dispatch import Decision, Dispatcher, Reason
from ostinato.graphs.dispatching.keys import GraphKey, capture_keys
from ostinato.graphs.dispatching.ladder import Ladder
from ostinato.graphs.dispatching.mode import Capability, GraphMode
from ostinato.graphs.errors import ConfigError

FULL_CONTEXTS = st.sampled_from([None, None, 4, 8, 16])
EXTRAS = st.sampled_from([None, None, None, None, "a", 1])


def serves(key: GraphKey, shape: BatchShape, ignoring: Iterable[str] = ()) -> bool:
    graph = key.descriptor
    obstacles = {
        "extra": graph.extra != shape.extra,
        "lora": graph.lora < shape.lora,
        "padding": graph.num_tokens != shape.num_tokens,
        "size": graph.num_tokens < shape.num_tokens or graph.num_reqs < shape.num_reqs,
    }
    if key.mode is FULL:
        obstacles["cascade"] = graph.cascade != shape.cascade
        obstacles["context"] = graph.context is not None and graph.context < shape.context
        obstacles["length"] = graph.query_len is not None and graph.query_len != shape.query_len
    return not any(there for name, there in obstacles.items() if name not in ignoring)


def price(graph: BatchDescriptor) -> tuple[float, ...]:
    context = float("inf") if graph.context is None else graph.context
    return (graph.num_tokens, graph.lora, context, 0 if graph.query_len else 1)


class Reference:
    """The rules of the dispatcher, each by a scan over all graphs."""

    def __init__(
        self, graphs: Dispatcher, lost: dict[GraphKey, Reason], query_len: int, padding: bool
    ) -> None:
        self.mode, self.requested = graphs.mode, graphs.requested
        self.live, self.lost = graphs.live, lost
        self.ignoring = {"padding"} if padding else set()
        self.lengths = {query_len} | {key.descriptor.query_len for key in [*self.live, *lost]} - {None}

    def candidates(self, mode: GraphMode, shape: BatchShape) -> list[BatchDescriptor]:
        return [key.descriptor for key in self.live if key.mode is mode and serves(key, shape, self.ignoring)]

    def modes(self, shape: BatchShape) -> tuple[GraphMode, list[GraphMode]]:
        decode = shape.query_len in self.lengths
        wanted = self.requested.decode if decode else self.requested.mixed
        path = self.mode.decode if decode else self.mode.mixed
        if path is NONE:
            return wanted, []
        allowed = [FULL] if path is FULL else []
        return wanted, allowed + ([PIECEWISE] if self.mode.mixed is PIECEWISE else [])

    def cause(self, shape: BatchShape, modes: list[GraphMode]) -> set[Reason]:
        """Every answer that the rules allow."""
        gone = {r for key, r in self.lost.items() if key.mode in modes and serves(key, shape, self.ignoring)}
        if gone:
            return gone

        def found(*dropped: str) -> bool:
            return any(
                key.mode in modes and serves(key, shape, self.ignoring | {*dropped}) for key in self.live
            )

        names = {
            "cascade": Reason.CASCADE_ATTENTION,
            "extra": Reason.NO_GRAPH_FOR_EXTRA,
            "lora": Reason.NO_GRAPH_FOR_LORA,
            "context": Reason.NO_GRAPH_FOR_CONTEXT,
            "padding": Reason.PADDING_DISABLED,
        }
        if not shape.cascade:
            # To need no cascade is not a requirement that anybody would drop.
            del names["cascade"]
        for how_many in range(1, len(names) + 1):
            for dropped in combinations(names, how_many):
                if found(*dropped):
                    return {names[dropped[0]]}
        if found(*names, "size"):
            return {Reason.LARGER_THAN_MAX}
        if found(*names, "length"):
            return {Reason.NO_GRAPH_FOR_QUERY_LENGTH if shape.query_len else Reason.MIXED_BATCH}
        return {Reason.LARGER_THAN_MAX if found(*names, "size", "length") else Reason.NOT_CAPTURED}

    def check(self, shape: BatchShape, decision: Decision) -> None:
        wanted, modes = self.modes(shape)
        for mode in modes:
            able = self.candidates(mode, shape)
            if not able:
                continue
            assert decision.mode is mode
            assert decision.descriptor in able
            chosen = decision.descriptor
            assert price(chosen) == min(map(price, able))
            exact = chosen.num_tokens == shape.num_tokens
            assert decision.reason is (Reason.EXACT if exact else Reason.PADDED)
            if mode is PIECEWISE and wanted is FULL:
                allowed = self.cause(shape, [FULL]) if FULL in modes else {Reason.BACKEND_CAPABILITY}
                assert decision.why_not_full in allowed
            else:
                assert decision.why_not_full is None
            return
        assert decision.is_eager
        assert decision.descriptor is None
        assert decision.why_not_full is None
        if modes:
            assert decision.reason in self.cause(shape, modes)
        elif self.requested is NONE:
            assert decision.reason is Reason.DISABLED
        elif wanted is not NONE:
            assert decision.reason is Reason.BACKEND_CAPABILITY
        elif shape.query_len is None:
            assert decision.reason is Reason.MIXED_BATCH
        else:
            assert decision.reason is Reason.NO_GRAPH_FOR_QUERY_LENGTH


@st.composite
def keys_strategy(draw: st.DrawFn) -> GraphKey:
    more: dict[str, Any] = {"lora": draw(st.sampled_from([0, 0, 1, 3])), "extra": draw(EXTRAS)}
    num_reqs = draw(st.integers(1, 12))
    num_tokens = num_reqs + draw(st.integers(0, 12))
    if draw(st.integers(0, 3)) == 0:
        return piecewise(num_tokens, num_reqs, **more)
    more |= {"context": draw(FULL_CONTEXTS), "cascade": draw(st.integers(0, 3)) == 0}
    if draw(st.booleans()):
        return full_mixed(num_tokens, num_reqs, **more)
    return full(num_reqs, draw(st.sampled_from([1, 1, 2, 3])), **more)


@st.composite
def shapes_strategy(draw: st.DrawFn) -> BatchShape:
    num_reqs, query_len = draw(st.integers(1, 13)), draw(st.sampled_from([None, 1, 1, 2, 3, 4]))
    num_tokens = num_reqs + draw(st.integers(0, 13)) if query_len is None else num_reqs * query_len
    return BatchShape(
        num_tokens,
        num_reqs,
        query_len,
        lora=draw(st.sampled_from([0, 0, 0, 1, 2, 4])),
        cascade=draw(st.integers(0, 5)) == 0,
        extra=draw(EXTRAS),
        context=draw(st.sampled_from([0, 0, 3, 4, 5, 8, 9, 17])),
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_decisions_follow_the_rules(data: st.DataObject) -> None:
    check_decisions(data)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=4000, deadline=None)
@given(data=st.data())
def test_many_decisions_follow_the_rules(data: st.DataObject) -> None:
    check_decisions(data)


def check_decisions(data: st.DataObject) -> None:
    """Any graphs, of which some were lost, and any batches."""
    mode = data.draw(st.sampled_from([*GraphMode, FULL, FULL_AND_PIECEWISE, FULL_AND_PIECEWISE]))
    capability = data.draw(st.sampled_from([*Capability, Capability.ALWAYS, Capability.ALWAYS]))
    query_len = data.draw(st.sampled_from([1, 1, 3]))
    padding = data.draw(st.integers(0, 3)) > 0
    graphs = Dispatcher(mode, capability=capability, query_len=query_len, padding=padding)
    lost: dict[GraphKey, Reason] = {}
    for key in data.draw(st.lists(keys_strategy(), max_size=14, unique=True)):
        fate = data.draw(st.sampled_from(["live", "live", "live", "removed", "failed"]))
        try:
            if fate == "failed":
                graphs.mark_failed(key, Reason.CAPTURE_FAILED)
                lost[key] = Reason.CAPTURE_FAILED
            else:
                graphs.add(key)
        except ConfigError:
            continue
        if fate == "removed":
            graphs.mark_failed(key, Reason.OUT_OF_MEMORY)
            lost[key] = Reason.OUT_OF_MEMORY
    reference = Reference(graphs, lost, query_len, padding)
    shapes = data.draw(st.lists(shapes_strategy(), min_size=1, max_size=12))
    for shape in [*shapes, *shapes]:
        reference.check(shape, graphs.decide(shape))


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.sets(
        st.tuples(st.integers(1, 9), st.integers(1, 9)).filter(lambda s: s[1] <= s[0]), max_size=30
    ),
    padding=st.booleans(),
)
def test_graphs_may_have_any_tokens_with_any_requests(sizes: set[tuple[int, int]], padding: bool) -> None:
    keys = [full_mixed(num_tokens, num_reqs) for num_tokens, num_reqs in sizes]
    graphs = dispatcher(FULL, keys, padding=padding)
    reference = Reference(graphs, {}, 1, padding)
    for num_tokens in range(1, 11):
        for num_reqs in range(1, num_tokens + 1):
            shape = BatchShape(num_tokens, num_reqs)
            reference.check(shape, graphs.decide(shape))


@given(st.permutations([4, 8, 16, 32]))
def test_context_buckets_may_come_in_any_order(buckets: list[int]) -> None:
    graphs = dispatcher(FULL_DECODE_ONLY, [full(4, context=bucket) for bucket in buckets])
    for context in range(33):
        expected = min(bucket for bucket in buckets if bucket >= context)
        assert graphs.decide(BatchShape.decode(4, context=context)) == replay(
            full(4, context=expected), Reason.EXACT
        )
    assert graphs.decide(BatchShape.decode(4, context=33)) == eager(Reason.NO_GRAPH_FOR_CONTEXT)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_decisions_do_not_depend_on_the_order_of_capture(data: st.DataObject) -> None:
    keys = [key for key in data.draw(st.lists(keys_strategy(), max_size=12, unique=True)) if key.mode is FULL]
    shapes = data.draw(st.lists(shapes_strategy(), min_size=1, max_size=8))
    forward, backward = dispatcher(FULL, keys), dispatcher(FULL, reversed(keys))
    for shape in shapes:
        assert forward.decide(shape) == backward.decide(shape)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 4), st.lists(st.integers(1, 320), min_size=1, max_size=20))
def test_a_ladder_of_graphs_rounds_up_like_the_ladder(limit: int, query_len: int, batches: list[int]) -> None:
    ladder = Ladder.sglang(limit)
    keys = capture_keys(FULL_DECODE_ONLY, ladder, None, query_len=query_len, max_reqs=limit)
    graphs = dispatcher(FULL_DECODE_ONLY, keys, query_len=query_len)
    for batch in batches:
        rung = ladder.round_up(batch)
        decision = graphs.decide(BatchShape.decode(batch, query_len))
        if rung is None:
            assert decision == eager(Reason.LARGER_THAN_MAX)
        else:
            assert decision.descriptor == BatchDescriptor.decode(rung, query_len)
