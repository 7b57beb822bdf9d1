"""Which graph serves a batch, case by case, and the reason when none does."""

import timeit
from dataclasses import replace
from pathlib import Path

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

from ostinato.graphs.dispatching.descriptor import BatchDescriptor, BatchShape
from ostinato.graphs.dispatching.dispatch import Dispatcher, Reason
from ostinato.graphs.dispatching.keys import GraphKey, capture_keys
from ostinato.graphs.dispatching.ladder import Ladder
from ostinato.graphs.dispatching.mode import Capability
from ostinato.graphs.errors import ConfigError


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
        FULL_DECODE_ONLY,
        Ladder([1, 2, 4]),
        None,
        max_reqs=4,
        lora_cases=(0, 2, 8),
        context_buckets=(64, 512, None),
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
    graphs.mark_failed(full(8), reason)
    assert graphs.live == [full(2)]
    assert graphs.decide(SMALL) == eager(reason)
    assert graphs.decide(BatchShape.decode(9)) == eager(Reason.LARGER_THAN_MAX)
    never_added = dispatcher(FULL_DECODE_ONLY, [])
    never_added.mark_failed(full(8), reason)
    assert never_added.decide(SMALL) == eager(reason)


def test_a_lost_query_length_keeps_its_path() -> None:
    graphs = dispatcher(FULL_DECODE_ONLY, [full(8), full(8, 3)])
    graphs.mark_failed(full(8, 3), Reason.OUT_OF_MEMORY)
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
    graphs.mark_failed(full(4), Reason.OUT_OF_MEMORY)
    assert graphs.decide(SMALL) == replay(full(8), Reason.PADDED)
    graphs.mark_failed(full(8), Reason.CAPTURE_FAILED)
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
    assert single.live == [full(4)]


def test_losing_a_graph_needs_a_cause() -> None:
    graphs = dispatcher(FULL, [full(4)])
    for reason in (Reason.EXACT, Reason.PADDED):
        with pytest.raises(ConfigError, match="why"):
            graphs.mark_failed(full(4), reason)
    assert graphs.live == [full(4)]


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
