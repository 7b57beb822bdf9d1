import timeit
from collections.abc import Iterable
from dataclasses import FrozenInstanceError, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.graphs.dispatching.descriptor import BatchDescriptor, BatchShape
from ostinato.graphs.dispatching.dispatch import Decision, Dispatcher, Reason
from ostinato.graphs.dispatching.keys import GraphKey, capture_keys, capture_order
from ostinato.graphs.dispatching.ladder import Ladder
from ostinato.graphs.dispatching.mode import Capability, GraphMode
from ostinato.graphs.errors import BatchError, ConfigError

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
FULL_DECODE_ONLY, FULL_AND_PIECEWISE = GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE


def full(num_reqs: int, query_len: int = 1, **rest: Any) -> GraphKey:
    return GraphKey(FULL, BatchDescriptor.decode(num_reqs, query_len, **rest))


def full_mixed(num_tokens: int, num_reqs: int, **rest: Any) -> GraphKey:
    return GraphKey(FULL, BatchDescriptor(num_tokens, num_reqs, **rest))


def piecewise(num_tokens: int, num_reqs: int, **rest: Any) -> GraphKey:
    return GraphKey(PIECEWISE, BatchDescriptor(num_tokens, num_reqs, **rest))


def dispatcher(mode: GraphMode, keys: Iterable[GraphKey], **options: Any) -> Dispatcher:
    made = Dispatcher(mode, **options)
    for key in keys:
        made.add(key)
    return made


def replay(key: GraphKey, reason: Reason, why_not_full: Reason | None = None) -> Decision:
    return Decision(key.mode, key.descriptor, reason, why_not_full)


def eager(reason: Reason) -> Decision:
    return Decision(NONE, None, reason)


# ---------------------------------------------------------------------------------------- descriptors


def test_descriptors_say_what_they_serve() -> None:
    assert str(BatchDescriptor.decode(8)) == "decode 8x1"
    assert str(BatchDescriptor.decode(6, 3, lora=4, context=4096)) == "decode 6x3 lora<=4 context<=4096"
    assert str(BatchDescriptor(512, 64)) == "mixed 512 tokens/64 reqs"
    assert str(BatchDescriptor.decode(2, cascade=True, extra="a")) == "decode 2x1 cascade extra='a'"
    assert str(BatchShape.decode(7, 2, lora=1, context=90)) == "decode 7x2 lora=1 context=90"
    assert str(BatchShape(9, 2, cascade=True, extra=(1, 2))) == "mixed 9 tokens/2 reqs cascade extra=(1, 2)"


def test_decode_multiplies_requests_by_the_query_length() -> None:
    assert BatchDescriptor.decode(6, 3) == BatchDescriptor(18, 6, 3)
    more: dict[str, Any] = {"lora": 2, "cascade": True, "context": 9, "extra": "a"}
    assert BatchDescriptor.decode(4, 3, **more) == BatchDescriptor(12, 4, 3, **more)
    assert BatchShape.decode(4, 3, **more) == BatchShape(12, 4, 3, **more)
    assert BatchShape.decode(4, 3, **more).as_descriptor() == BatchDescriptor(12, 4, 3, **more)


@pytest.mark.parametrize(
    "counts", [(0, 0), (0, 1), (1, 0), (-1, -1), (2, 3), (8, 4, 3), (4, 4, 0), (4, 4, -1), (4, 5, 1)]
)
def test_impossible_counts_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        BatchDescriptor(*counts)
    with pytest.raises(BatchError):
        BatchShape(*counts)


def test_negative_extras_are_refused() -> None:
    with pytest.raises(ConfigError):
        BatchDescriptor(1, 1, lora=-1)
    for context in (0, -1):
        with pytest.raises(ConfigError):
            BatchDescriptor(1, 1, context=context)
    with pytest.raises(BatchError):
        BatchShape(1, 1, lora=-1)
    with pytest.raises(BatchError):
        BatchShape(1, 1, context=-1)


def test_descriptors_are_frozen_hashable_and_ordered() -> None:
    cheap_to_dear = [
        BatchDescriptor.decode(4),
        BatchDescriptor(4, 4),
        BatchDescriptor.decode(4, lora=2),
        BatchDescriptor.decode(8, context=64),
        BatchDescriptor.decode(4, 2),
        BatchDescriptor.decode(8),
        BatchDescriptor(8, 2),
    ]
    assert sorted({*cheap_to_dear}) == cheap_to_dear
    assert cheap_to_dear[0] < cheap_to_dear[1] <= cheap_to_dear[1]
    assert len({*cheap_to_dear, BatchDescriptor(4, 4, 1)}) == len(cheap_to_dear)
    with pytest.raises(FrozenInstanceError):
        cheap_to_dear[0].num_tokens = 5  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        BatchShape(1, 1).num_tokens = 5  # type: ignore[misc]


@pytest.mark.parametrize("extras", [(None, "a", "b"), (1, None, "a"), ((1, "a"), 2, frozenset({3}))])
def test_descriptors_order_whatever_their_extras_are(extras: tuple[Any, ...]) -> None:
    descriptors = [BatchDescriptor.decode(4, extra=extra) for extra in extras]
    for one, other in combinations(descriptors, 2):
        assert (one < other) is not (other < one)
    assert max(descriptors) < BatchDescriptor.decode(5)


# --------------------------------------------------------------------------------------- capture keys

DECODE, TOKENS = Ladder([1, 2, 4]), Ladder([8, 16])


@pytest.mark.parametrize(
    ("mode", "count"),
    [
        (NONE, 0),
        (PIECEWISE, 2 * 3),
        (FULL, (3 + 2) * 3 * 2),
        (FULL_DECODE_ONLY, 3 * 3 * 2),
        (FULL_AND_PIECEWISE, 3 * 3 * 2 + 2 * 3),
    ],
)
def test_key_counts_per_mode(mode: GraphMode, count: int) -> None:
    keys = capture_keys(
        mode, DECODE, TOKENS, query_len=2, max_reqs=4, lora_cases=(0, 1, 4), context_buckets=(64, None)
    )
    assert len(keys) == len(set(keys)) == count
    accepting = Dispatcher(mode, query_len=2)
    for key in keys:
        accepting.add(key)
    in_use = accepting.keys()
    assert {*in_use} == {*keys}
    assert [key.descriptor for key in in_use] == sorted(key.descriptor for key in keys)


def test_keys_are_captured_largest_first() -> None:
    assert capture_keys(FULL_AND_PIECEWISE, Ladder([1, 8]), Ladder([4, 8]), max_reqs=8) == [
        full(8),
        piecewise(8, 8),
        piecewise(4, 4),
        full(1),
    ]
    keys = capture_keys(
        FULL,
        Ladder.every(40),
        Ladder.prefill(64),
        max_reqs=40,
        lora_cases=(0, 4, 1),
        context_buckets=(8, None, 64),
    )
    for earlier, later in pairwise(keys):
        assert earlier.descriptor.num_tokens >= later.descriptor.num_tokens
    biggest = [key.descriptor for key in keys[:9]]
    assert [(d.lora, d.context) for d in biggest] == [(n, c) for n in (4, 1, 0) for c in (None, 64, 8)]


def test_the_keys_of_each_path() -> None:
    assert capture_keys(FULL, Ladder([2]), Ladder([8, 2]), query_len=3, max_reqs=4, context_buckets=(9,)) == [
        full_mixed(8, 4, context=9),
        full(2, 3, context=9),
        full_mixed(2, 2, context=9),
    ]
    # Attention is outside of a piecewise graph: one graph serves every context.
    assert capture_keys(PIECEWISE, None, Ladder([8]), max_reqs=4, context_buckets=(9, 99)) == [
        piecewise(8, 4)
    ]


def test_decode_keys_for_cascade_attention_are_made_when_asked_for() -> None:
    assert capture_keys(FULL_AND_PIECEWISE, Ladder([2]), Ladder([8]), max_reqs=2, cascade=True) == [
        piecewise(8, 2),
        full(2, cascade=True),
        full(2),
    ]
    keys = capture_keys(
        FULL, DECODE, TOKENS, max_reqs=4, lora_cases=(0, 1), context_buckets=(8, None), cascade=True
    )
    assert len(keys) == len(set(keys)) == (3 * 2 + 2) * 2 * 2
    # Attention is outside of a piecewise graph.
    assert capture_keys(PIECEWISE, None, Ladder([8]), max_reqs=4, cascade=True) == [piecewise(8, 4)]


def test_keys_with_extras_of_any_type_have_an_order_of_capture() -> None:
    keys = [full(size, extra=extra) for size in (2, 4) for extra in ("a", None, 1)]
    assert len({capture_order(key) for key in keys}) == 6
    assert [key.descriptor.num_reqs for key in sorted(keys, key=capture_order)] == [4, 4, 4, 2, 2, 2]


@pytest.mark.parametrize(
    ("mode", "decode", "tokens", "missing"),
    [
        (FULL, None, TOKENS, "decode ladder"),
        (FULL_DECODE_ONLY, None, TOKENS, "decode ladder"),
        (FULL_AND_PIECEWISE, None, TOKENS, "decode ladder"),
        (FULL, DECODE, None, "token ladder"),
        (FULL_AND_PIECEWISE, DECODE, None, "token ladder"),
        (PIECEWISE, DECODE, None, "token ladder"),
    ],
)
def test_a_missing_ladder_is_named(
    mode: GraphMode, decode: Ladder | None, tokens: Ladder | None, missing: str
) -> None:
    with pytest.raises(ConfigError, match=f"{mode.name} .* needs a {missing}"):
        capture_keys(mode, decode, tokens, max_reqs=4)


def test_ladders_that_a_mode_does_not_need_may_be_missing() -> None:
    assert capture_keys(NONE, None, None, max_reqs=4) == []
    assert capture_keys(FULL_DECODE_ONLY, DECODE, None, max_reqs=4) == [full(4), full(2), full(1)]


def test_capture_keys_refuses_contradictions() -> None:
    with pytest.raises(ConfigError, match=r"up_to\(3\)"):
        capture_keys(FULL_DECODE_ONLY, DECODE, None, max_reqs=3)
    with pytest.raises(ConfigError, match="max_reqs"):
        capture_keys(NONE, None, None, max_reqs=0)
    for cases in ([], [0, 0], [-1]):
        with pytest.raises(ConfigError):
            capture_keys(FULL_DECODE_ONLY, DECODE, None, max_reqs=4, lora_cases=cases)
    for buckets in ([], [None, None], [0]):
        with pytest.raises(ConfigError):
            capture_keys(FULL_DECODE_ONLY, DECODE, None, max_reqs=4, context_buckets=buckets)


# ------------------------------------------------------------------------------------ decisions by name


def test_twelve_tokens_of_query_length_three_use_the_eighteen_token_graph() -> None:
    graphs = dispatcher(FULL_AND_PIECEWISE, [full(6, 3), full(2, 3), piecewise(12, 12)], query_len=3)
    assert graphs.decide(BatchShape.decode(4, 3)) == replay(full(6, 3), Reason.PADDED)
    assert graphs.decide(BatchShape(12, 4)) == replay(piecewise(12, 12), Reason.EXACT)


def test_a_uniform_batch_may_use_a_full_graph_for_mixed_ones_and_never_the_reverse() -> None:
    graphs = dispatcher(FULL, [full(8), full_mixed(16, 4)])
    assert graphs.decide(BatchShape.decode(3, 4)) == replay(full_mixed(16, 4), Reason.PADDED)
    assert graphs.decide(BatchShape(8, 8)) == eager(Reason.LARGER_THAN_MAX)
    assert graphs.decide(BatchShape(8, 4)) == replay(full_mixed(16, 4), Reason.PADDED)
    graphs.add(full_mixed(8, 8))
    assert graphs.decide(BatchShape.decode(8)) == replay(full(8), Reason.EXACT)


def test_exact_is_about_tokens() -> None:
    graphs = dispatcher(FULL, [full(8), full_mixed(16, 8)])
    assert graphs.decide(BatchShape.decode(8)).reason is Reason.EXACT
    assert graphs.decide(BatchShape.decode(7)).reason is Reason.PADDED
    assert graphs.decide(BatchShape(16, 3)).reason is Reason.EXACT
    assert graphs.decide(BatchShape(15, 8)).reason is Reason.PADDED


def test_the_cheapest_sufficient_lora_and_context_case_is_taken() -> None:
    keys = capture_keys(
        FULL_DECODE_ONLY, DECODE, None, max_reqs=4, lora_cases=(0, 2, 8), context_buckets=(64, 512, None)
    )
    graphs = dispatcher(FULL_DECODE_ONLY, keys)
    for lora, context, case in [
        (0, 0, (0, 64)),
        (0, 64, (0, 64)),
        (1, 65, (2, 512)),
        (2, 513, (2, None)),
        (3, 10**9, (8, None)),
    ]:
        chosen = graphs.decide(BatchShape.decode(3, lora=lora, context=context)).descriptor
        assert chosen == BatchDescriptor.decode(4, lora=case[0], context=case[1])


def test_full_comes_before_an_exact_piecewise_graph() -> None:
    graphs = dispatcher(FULL_AND_PIECEWISE, [full(64), piecewise(3, 3)])
    assert graphs.decide(BatchShape.decode(3)) == replay(full(64), Reason.PADDED)


def test_a_piecewise_graph_ignores_context_and_cascade_but_not_lora_and_extra() -> None:
    graphs = dispatcher(PIECEWISE, [piecewise(8, 8)])
    shape = BatchShape(8, 2, context=10**6, cascade=True)
    assert graphs.decide(shape) == replay(piecewise(8, 8), Reason.EXACT)
    assert graphs.decide(replace(shape, lora=1)) == eager(Reason.NO_GRAPH_FOR_LORA)
    assert graphs.decide(replace(shape, extra="a")) == eager(Reason.NO_GRAPH_FOR_EXTRA)


def test_lowering_is_told() -> None:
    graphs = Dispatcher(FULL, capability=Capability.UNIFORM_BATCH)
    assert graphs.mode is FULL_AND_PIECEWISE
    assert graphs.requested is FULL
    assert "ALWAYS" in (graphs.lowered or "")
    assert Dispatcher(FULL).lowered is None


# -------------------------------------------------------------------------------------- reasons by name

SMALL = BatchShape.decode(4)


def test_reason_disabled() -> None:
    graphs = Dispatcher(NONE)
    assert graphs.decide(SMALL) == eager(Reason.DISABLED)
    assert graphs.decide(BatchShape(4, 2)) == eager(Reason.DISABLED)
    assert graphs.decide(SMALL).is_eager


def test_reason_not_captured() -> None:
    assert Dispatcher(FULL).decide(SMALL) == eager(Reason.NOT_CAPTURED)
    assert Dispatcher(PIECEWISE).decide(SMALL) == eager(Reason.NOT_CAPTURED)
    only_cascade = dispatcher(FULL_DECODE_ONLY, [full(8, cascade=True)])
    assert only_cascade.decide(SMALL) == eager(Reason.NOT_CAPTURED)


def test_reason_larger_than_max() -> None:
    graphs = dispatcher(FULL_AND_PIECEWISE, [full(8), piecewise(16, 8)])
    assert graphs.decide(BatchShape.decode(17)) == eager(Reason.LARGER_THAN_MAX)
    assert graphs.decide(BatchShape(17, 2, lora=3)) == eager(Reason.LARGER_THAN_MAX)
    assert graphs.decide(BatchShape(12, 9)) == eager(Reason.LARGER_THAN_MAX)
    many_decodes = dispatcher(FULL, [full(64), full_mixed(16, 8)])
    assert many_decodes.decide(BatchShape(32, 2)) == eager(Reason.LARGER_THAN_MAX)


def test_reason_mixed_batch() -> None:
    graphs = dispatcher(FULL_DECODE_ONLY, [full(8)])
    assert graphs.decide(BatchShape(4, 2)) == eager(Reason.MIXED_BATCH)
    assert Dispatcher(FULL_DECODE_ONLY).decide(BatchShape(4, 2)) == eager(Reason.MIXED_BATCH)
    assert dispatcher(FULL, [full(8)]).decide(BatchShape(4, 2)) == eager(Reason.MIXED_BATCH)


def test_reason_lora() -> None:
    graphs = dispatcher(FULL_DECODE_ONLY, [full(8), full(2, lora=4)])
    assert graphs.decide(replace(SMALL, lora=1)) == eager(Reason.NO_GRAPH_FOR_LORA)
    assert graphs.decide(BatchShape.decode(2, lora=1)).descriptor == BatchDescriptor.decode(2, lora=4)
    assert graphs.decide(BatchShape.decode(9, lora=1)) == eager(Reason.LARGER_THAN_MAX)


def test_reason_query_length() -> None:
    graphs = dispatcher(FULL_DECODE_ONLY, [full(8), full(8, 3)])
    assert graphs.decide(BatchShape.decode(2, 3)) == replay(full(8, 3), Reason.PADDED)
    assert graphs.decide(BatchShape.decode(2, 2)) == eager(Reason.NO_GRAPH_FOR_QUERY_LENGTH)
    drafting = dispatcher(FULL_DECODE_ONLY, [full(8, 3)])
    assert drafting.decide(BatchShape.decode(2)) == eager(Reason.NO_GRAPH_FOR_QUERY_LENGTH)
    assert drafting.decide(BatchShape.decode(9)) == eager(Reason.LARGER_THAN_MAX)


def test_reason_context() -> None:
    graphs = dispatcher(FULL_DECODE_ONLY, [full(8, context=64)])
    assert graphs.decide(replace(SMALL, context=64)) == replay(full(8, context=64), Reason.PADDED)
    assert graphs.decide(replace(SMALL, context=65)) == eager(Reason.NO_GRAPH_FOR_CONTEXT)


def test_reason_cascade() -> None:
    graphs = dispatcher(FULL_DECODE_ONLY, [full(8)])
    assert graphs.decide(replace(SMALL, cascade=True)) == eager(Reason.CASCADE_ATTENTION)
    graphs.add(full(4, cascade=True))
    assert graphs.decide(replace(SMALL, cascade=True)) == replay(full(4, cascade=True), Reason.EXACT)
    assert graphs.decide(SMALL) == replay(full(8), Reason.PADDED)
    assert graphs.decide(BatchShape.decode(5, cascade=True)) == eager(Reason.CASCADE_ATTENTION)
    assert graphs.decide(BatchShape.decode(9, cascade=True)) == eager(Reason.LARGER_THAN_MAX)


def test_reason_extra() -> None:
    graphs = dispatcher(FULL_DECODE_ONLY, [full(8), full(2, extra="a")])
    assert graphs.decide(replace(SMALL, extra="a")) == eager(Reason.NO_GRAPH_FOR_EXTRA)
    assert graphs.decide(replace(SMALL, extra="b")) == eager(Reason.NO_GRAPH_FOR_EXTRA)
    assert graphs.decide(BatchShape.decode(2, extra="a")) == replay(full(2, extra="a"), Reason.EXACT)
    assert graphs.decide(BatchShape.decode(2)) == replay(full(8), Reason.PADDED)
    named = dispatcher(FULL_DECODE_ONLY, [full(2, extra="a")])
    assert named.decide(BatchShape.decode(2)) == eager(Reason.NO_GRAPH_FOR_EXTRA)
    assert named.decide(BatchShape.decode(3, extra="a")) == eager(Reason.LARGER_THAN_MAX)


def test_of_several_causes_the_first_is_named() -> None:
    graphs = dispatcher(FULL_DECODE_ONLY, [full(8, context=64)])
    assert graphs.decide(replace(SMALL, lora=1, context=65)) == eager(Reason.NO_GRAPH_FOR_LORA)
    hard = replace(SMALL, lora=1, context=65, cascade=True, extra="a")
    assert graphs.decide(hard) == eager(Reason.CASCADE_ATTENTION)


@pytest.mark.parametrize("reason", [Reason.CAPTURE_FAILED, Reason.OUT_OF_MEMORY])
def test_reason_of_a_lost_graph(reason: Reason) -> None:
    graphs = dispatcher(FULL_DECODE_ONLY, [full(2), full(8)])
    graphs.remove(full(8), reason)
    assert graphs.keys() == (full(2),)
    assert graphs.decide(SMALL) == eager(reason)
    assert graphs.decide(BatchShape.decode(9)) == eager(Reason.LARGER_THAN_MAX)
    never_added = dispatcher(FULL_DECODE_ONLY, [])
    never_added.mark_failed(full(8), reason)
    assert never_added.decide(SMALL) == eager(reason)


def test_a_lost_query_length_keeps_its_path() -> None:
    graphs = dispatcher(FULL_DECODE_ONLY, [full(8), full(8, 3)])
    graphs.remove(full(8, 3), Reason.OUT_OF_MEMORY)
    assert graphs.decide(BatchShape.decode(2, 3)) == eager(Reason.OUT_OF_MEMORY)


def test_reason_backend_capability() -> None:
    never = Dispatcher(FULL_DECODE_ONLY, capability=Capability.NEVER)
    assert never.decide(SMALL) == eager(Reason.BACKEND_CAPABILITY)
    # What was never asked for is not the backend's fault.
    assert never.decide(BatchShape(4, 2)) == eager(Reason.MIXED_BATCH)


def test_reason_padding_disabled() -> None:
    graphs = dispatcher(FULL_AND_PIECEWISE, [full(8), full(4), piecewise(3, 3)], padding=False)
    assert graphs.decide(SMALL) == replay(full(4), Reason.EXACT)
    assert graphs.decide(BatchShape.decode(5)) == eager(Reason.PADDING_DISABLED)
    assert graphs.decide(BatchShape.decode(3)) == replay(
        piecewise(3, 3), Reason.EXACT, Reason.PADDING_DISABLED
    )
    assert graphs.decide(BatchShape.decode(9)) == eager(Reason.LARGER_THAN_MAX)


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (BatchShape.decode(9), Reason.LARGER_THAN_MAX),
        (replace(SMALL, cascade=True), Reason.CASCADE_ATTENTION),
        (replace(SMALL, context=65), Reason.NO_GRAPH_FOR_CONTEXT),
        (replace(SMALL, lora=1), Reason.NO_GRAPH_FOR_LORA),
        (replace(SMALL, lora=3), Reason.CAPTURE_FAILED),
        (BatchShape(4, 2), None),
        (BatchShape.decode(2, 2), None),
    ],
)
def test_a_piecewise_decision_says_why_not_full(shape: BatchShape, why: Reason | None) -> None:
    graphs = dispatcher(FULL_AND_PIECEWISE, [full(8, context=64), piecewise(16, 16, lora=4)])
    if shape.lora == 3:
        graphs.mark_failed(full(8, lora=4), Reason.CAPTURE_FAILED)
    decision = graphs.decide(shape)
    assert decision.mode is PIECEWISE
    assert decision.why_not_full is why


def test_why_not_full_names_the_backend_or_the_missing_capture() -> None:
    lowered = dispatcher(FULL, [piecewise(16, 16)], capability=Capability.UNIFORM_BATCH)
    assert lowered.decide(BatchShape(4, 2)).why_not_full is Reason.BACKEND_CAPABILITY
    assert lowered.decide(SMALL).why_not_full is Reason.NOT_CAPTURED
    asked = dispatcher(PIECEWISE, [piecewise(16, 16)])
    assert asked.decide(SMALL).why_not_full is None


# ------------------------------------------------------------------------------- graphs come and go


def test_adding_and_removing_changes_what_was_decided_before() -> None:
    graphs = dispatcher(FULL_DECODE_ONLY, [full(8)])
    assert graphs.decide(SMALL) == replay(full(8), Reason.PADDED)
    graphs.add(full(4))
    assert graphs.decide(SMALL) == replay(full(4), Reason.EXACT)
    graphs.remove(full(4), Reason.OUT_OF_MEMORY)
    assert graphs.decide(SMALL) == replay(full(8), Reason.PADDED)
    graphs.remove(full(8), Reason.CAPTURE_FAILED)
    assert graphs.decide(SMALL) == eager(Reason.OUT_OF_MEMORY)
    graphs.add(full(4))
    assert graphs.decide(SMALL) == replay(full(4), Reason.EXACT)
    assert graphs.decide(BatchShape.decode(5)) == eager(Reason.CAPTURE_FAILED)
    graphs.add(full(8))
    graphs.mark_failed(full(4), Reason.CAPTURE_FAILED)
    assert graphs.decide(SMALL) == replay(full(8), Reason.PADDED)


def test_graphs_that_no_batch_could_use_are_refused() -> None:
    with pytest.raises(ConfigError, match="NONE uses no full graphs"):
        Dispatcher(NONE).add(full(4))
    with pytest.raises(ConfigError, match="PIECEWISE uses no full graphs"):
        Dispatcher(PIECEWISE).add(full(4))
    with pytest.raises(ConfigError, match="FULL uses no piecewise graphs"):
        Dispatcher(FULL).add(piecewise(4, 4))
    with pytest.raises(ConfigError, match="FULL or PIECEWISE, not NONE"):
        Dispatcher(FULL).add(GraphKey(NONE, BatchDescriptor(4, 4)))
    for particular in ({"query_len": 1}, {"context": 8}, {"cascade": True}):
        with pytest.raises(ConfigError, match="any query length, context and attention"):
            Dispatcher(PIECEWISE).add(piecewise(4, 4, **particular))
    single = Dispatcher(FULL, capability=Capability.UNIFORM_SINGLE_TOKEN_DECODE)
    single.add(full(4))
    for key in (full(4, 2), full_mixed(4, 4)):
        for refusing in (single.check, single.add):
            with pytest.raises(ConfigError, match="does not allow"):
                refusing(key)
    single.check(full(8))
    assert single.keys() == (full(4),)


def test_removing_needs_a_graph_and_a_cause() -> None:
    graphs = dispatcher(FULL, [full(4)])
    with pytest.raises(ConfigError, match="no full graph for decode 8x1"):
        graphs.remove(full(8), Reason.OUT_OF_MEMORY)
    for reason in (Reason.EXACT, Reason.PADDED):
        with pytest.raises(ConfigError, match="why"):
            graphs.remove(full(4), reason)
    assert graphs.keys() == (full(4),)


# ------------------------------------------------------------------- against a slow, plain reference

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
        self.live, self.lost = graphs.keys(), lost
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


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_decisions_follow_the_rules(data: st.DataObject) -> None:
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
            graphs.remove(key, Reason.OUT_OF_MEMORY)
            lost[key] = Reason.OUT_OF_MEMORY
    reference = Reference(graphs, lost, query_len, padding)
    shapes = data.draw(st.lists(shapes_strategy(), min_size=1, max_size=12))
    for shape in [*shapes, *shapes]:
        reference.check(shape, graphs.decide(shape))


@settings(max_examples=300, deadline=None)
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


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_decisions_do_not_depend_on_the_order_of_capture(data: st.DataObject) -> None:
    keys = [key for key in data.draw(st.lists(keys_strategy(), max_size=12, unique=True)) if key.mode is FULL]
    shapes = data.draw(st.lists(shapes_strategy(), min_size=1, max_size=8))
    forward, backward = dispatcher(FULL, keys), dispatcher(FULL, reversed(keys))
    for shape in shapes:
        assert forward.decide(shape) == backward.decide(shape)


@settings(max_examples=200, deadline=None)
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


# ------------------------------------------------------------------------------------ what it costs


def test_a_repeated_shape_is_not_searched_for_again_whatever_its_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs = dispatcher(FULL_DECODE_ONLY, [full(8, context=4096), full(8)])
    first = graphs.decide(SMALL)
    per_call = min(timeit.repeat(lambda: graphs.decide(SMALL), number=2000, repeat=5)) / 2000
    # Far above what it takes (about 0.5 us), far below a search.
    assert per_call < 5e-6
    monkeypatch.delattr(Dispatcher, "_decide")
    for context in range(1, 4097, 97):
        assert graphs.decide(replace(SMALL, context=context)) is first


def test_the_memory_of_decisions_is_bounded() -> None:
    graphs = dispatcher(FULL_DECODE_ONLY, [full(8192)])
    for num_reqs in range(1, 9000):
        expected = Reason.LARGER_THAN_MAX if num_reqs > 8192 else Reason.PADDED
        decision = graphs.decide(BatchShape.decode(num_reqs))
        assert decision.reason is (Reason.EXACT if num_reqs == 8192 else expected)
        assert len(graphs._remembered) <= 4096


def test_every_reason_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "graphs.md").read_text()
    assert [reason for reason in Reason if f"| `{reason}` |" not in page] == []
