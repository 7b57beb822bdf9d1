"""Which batches run from which graph, on a runner with graphs in it."""

import pytest
import torch

from contract.steps import WIDTH, CallCounter, eager_padded, ints, randn, same
from ostinato.graphs import (
    BatchDescriptor,
    BatchShape,
    Capability,
    CudaGraphRunner,
    Dispatcher,
    Field,
    GraphKey,
    GraphMode,
    InputBuffers,
    Ladder,
    Reason,
    capture_keys,
    eager_boundary,
)

DECODE, TOKENS, MAX_REQS = Ladder([1, 2, 4]), Ladder([4, 8, 16]), 4

FIELDS = [
    Field("x", torch.float32, (WIDTH,)),
    Field("last", torch.int64, per="request"),
    Field("lengths", torch.int32, per="request", pad=1),
    Field("bias", torch.float32, (WIDTH,), per="fixed"),
]


@eager_boundary
def attention(h, lengths):
    return h + lengths.sum() * 0


def step(x, last, lengths, bias):
    """Hidden states per token; one row per request, gathered at its last token; and a tensor of neither."""
    hidden = attention(torch.tanh(x) + bias, lengths)
    return {"hidden": hidden, "last": hidden[last] / lengths[:, None], "bias": bias * 2}


def make(device, mode, *, keys=None, counter=None, **settings):
    keys = keys if keys is not None else capture_keys(mode, DECODE, TOKENS, max_reqs=MAX_REQS)
    buffers = InputBuffers(FIELDS, max_tokens=TOKENS.limit, max_reqs=MAX_REQS, device=device)
    runner = CudaGraphRunner(counter or step, buffers, keys, dispatcher=Dispatcher(mode, **settings))
    runner.capture(progress=False)
    assert not runner.failures
    return runner


def batch_of(device, lengths):
    """Requests with these query lengths, one after the other."""
    n = sum(lengths)
    ends = torch.tensor(lengths).cumsum(0) - 1
    return {
        "x": randn(n, WIDTH, device=device, seed=n),
        "last": ends.to(device),
        "lengths": ints(lengths, device, torch.int32),
        "bias": randn(WIDTH, device=device, seed=99),
    }


@pytest.mark.parametrize(
    ("mode", "full", "piecewise"),
    [
        (GraphMode.NONE, 0, 0),
        (GraphMode.PIECEWISE, 0, 3),
        (GraphMode.FULL, 6, 0),
        (GraphMode.FULL_DECODE_ONLY, 3, 0),
        (GraphMode.FULL_AND_PIECEWISE, 3, 3),
    ],
)
def test_each_mode_captures_as_many_graphs_as_its_paths_need(device, mode, full, piecewise):
    runner = make(device, mode)
    modes = [key.mode for key in runner.graphs]
    assert modes.count(GraphMode.FULL) == full
    assert modes.count(GraphMode.PIECEWISE) == piecewise
    assert len(runner.report().graphs) == full + piecewise
    assert {row.segments for row in runner.report().graphs if row.mode == "piecewise"} <= {2}
    assert {row.segments for row in runner.report().graphs if row.mode == "full"} <= {1}


@pytest.mark.parametrize(
    "mode", [GraphMode.PIECEWISE, GraphMode.FULL, GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE]
)
@pytest.mark.parametrize(
    "lengths", [[1], [1, 1], [1, 1, 1], [1] * 4, [3, 1], [5], [2, 1, 7], [4, 4, 4, 4], [9, 9]]
)
def test_any_batch_gives_what_eager_gives_at_the_same_padded_shape(device, mode, lengths):
    runner = make(device, mode)
    batch = batch_of(device, lengths)
    shape = runner.buffers.shape_of(batch)
    out = runner.run(batch)
    assert out["hidden"].shape == (sum(lengths), WIDTH)
    assert out["last"].shape == (len(lengths), WIDTH)
    assert out["bias"].shape == (WIDTH,)
    if runner.decide(shape).is_eager:
        assert same(out, step(**batch))
        return
    wanted = eager_padded(runner, batch)
    assert same(out["hidden"], wanted["hidden"][: sum(lengths)])
    assert same(out["last"], wanted["last"][: len(lengths)])
    assert same(out["bias"], wanted["bias"])


def test_exact_hit_padded_hit_and_above_the_maximum(device):
    runner = make(device, GraphMode.FULL)
    exact, padded, above = (runner.decide(BatchShape.decode(n)) for n in (4, 3, 17))
    assert (exact.mode, exact.descriptor, exact.reason) == (
        GraphMode.FULL,
        BatchDescriptor.decode(4),
        Reason.EXACT,
    )
    assert (padded.descriptor, padded.reason) == (BatchDescriptor.decode(4), Reason.PADDED)
    assert (above.is_eager, above.descriptor, above.reason) == (True, None, Reason.LARGER_THAN_MAX)
    assert runner.can_run(BatchShape.decode(3))
    assert not runner.can_run(BatchShape.decode(17))


def test_steps_above_the_maximum_run_eagerly_with_that_reason(device):
    counter = CallCounter(step)
    runner = make(device, GraphMode.FULL, counter=counter)
    calls = counter.calls
    batch = batch_of(device, [9, 9])
    assert same(runner.run(batch), step(**batch))
    assert counter.calls == calls + 1
    assert runner.eager_steps == {Reason.LARGER_THAN_MAX: 1}


def test_mixed_batches_run_piecewise_where_full_is_for_decode_only(device):
    runner = make(device, GraphMode.FULL_AND_PIECEWISE)
    assert runner.decide(BatchShape.decode(2)).mode is GraphMode.FULL
    mixed = runner.decide(BatchShape(5, 2))
    assert (mixed.mode, mixed.descriptor.num_tokens) == (GraphMode.PIECEWISE, 8)
    only = make(device, GraphMode.FULL_DECODE_ONLY)
    only.run(batch_of(device, [3, 1]))
    assert only.eager_steps == {Reason.MIXED_BATCH: 1}


def test_full_excluded_by_the_backend_becomes_piecewise_or_nothing(device):
    keys = capture_keys(GraphMode.PIECEWISE, None, TOKENS, max_reqs=MAX_REQS)
    runner = make(device, GraphMode.FULL, keys=keys, capability=Capability.NEVER)
    assert runner.dispatcher.mode is GraphMode.PIECEWISE
    decision = runner.decide(BatchShape.decode(3))
    assert (decision.mode, decision.why_not_full) == (GraphMode.PIECEWISE, Reason.BACKEND_CAPABILITY)
    assert "NEVER" in runner.report().lowered
    assert "NEVER" in str(runner.report())
    nothing = make(device, GraphMode.FULL_DECODE_ONLY, keys=[], capability=Capability.NEVER)
    nothing.run(batch_of(device, [1, 1]))
    assert nothing.eager_steps == {Reason.BACKEND_CAPABILITY: 1}


def test_a_full_graph_that_is_missing_lets_the_piecewise_one_act(device):
    keys = [
        key
        for key in capture_keys(GraphMode.FULL_AND_PIECEWISE, DECODE, TOKENS, max_reqs=MAX_REQS)
        if key.mode is GraphMode.PIECEWISE or key.descriptor.num_reqs < 4
    ]
    runner = make(device, GraphMode.FULL_AND_PIECEWISE, keys=keys)
    assert runner.decide(BatchShape.decode(2)).mode is GraphMode.FULL
    assert runner.decide(BatchShape.decode(3)).mode is GraphMode.PIECEWISE


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"lora": 1}, Reason.NO_GRAPH_FOR_LORA),
        ({"cascade": True}, Reason.CASCADE_ATTENTION),
        ({"extra": "drafting"}, Reason.NO_GRAPH_FOR_EXTRA),
        ({"context": 4096}, Reason.NO_GRAPH_FOR_CONTEXT),
    ],
)
def test_what_no_graph_was_captured_for_runs_eagerly_with_its_reason(device, more, reason):
    keys = capture_keys(GraphMode.FULL, DECODE, TOKENS, max_reqs=MAX_REQS, context_buckets=[128, 1024])
    runner = make(device, GraphMode.FULL, keys=keys)
    batch = batch_of(device, [1, 1])
    replayed = runner.run(batch, BatchShape.decode(2, context=100))["hidden"].clone()
    assert not runner.eager_steps
    eager = runner.run(batch, BatchShape.decode(2, **more))["hidden"]
    assert same(eager, replayed)
    assert runner.eager_steps == {reason: 1}
    assert str(reason) in str(runner.report())


def test_lora_cases_and_context_buckets_have_graphs_of_their_own(device):
    keys = capture_keys(
        GraphMode.FULL_DECODE_ONLY,
        DECODE,
        None,
        max_reqs=MAX_REQS,
        lora_cases=[0, 2],
        context_buckets=[64, None],
    )
    runner = make(device, GraphMode.FULL_DECODE_ONLY, keys=keys)
    assert len(runner.graphs) == 3 * 2 * 2
    batch = batch_of(device, [1, 1])
    for lora, context, wanted in ((0, 10, (0, 64)), (1, 10, (2, 64)), (2, 999, (2, None))):
        runner.run(batch, BatchShape.decode(2, lora=lora, context=context))
        used = runner.graphs[
            GraphKey(GraphMode.FULL, BatchDescriptor.decode(2, lora=wanted[0], context=wanted[1]))
        ]
        assert used.replays == 1
    assert not runner.eager_steps


def test_cascade_batches_have_graphs_of_their_own(device):
    keys = capture_keys(GraphMode.FULL_DECODE_ONLY, DECODE, None, max_reqs=MAX_REQS, cascade=True)
    runner = make(device, GraphMode.FULL_DECODE_ONLY, keys=keys)
    assert len(runner.graphs) == 3 * 2
    batch = batch_of(device, [1, 1, 1])
    for cascade in (False, True):
        out = runner.run(batch, BatchShape.decode(3, cascade=cascade))
        used = runner.graphs[GraphKey(GraphMode.FULL, BatchDescriptor.decode(4, cascade=cascade))]
        assert used.replays == 1
        assert same(out["hidden"], eager_padded(runner, batch)["hidden"][:3])
    assert not runner.eager_steps


def test_the_step_is_told_the_opaque_part_of_its_key(device):
    def scaled(x, descriptor):
        return x * (3 if descriptor.extra == "threefold" else 2)

    buffers = InputBuffers([FIELDS[0]], max_tokens=4, max_reqs=4, device=device)
    keys = [GraphKey(GraphMode.FULL, BatchDescriptor.decode(4, extra=extra)) for extra in (None, "threefold")]
    runner = CudaGraphRunner(scaled, buffers, keys)
    runner.capture(progress=False)
    x = randn(3, WIDTH, device=device)
    assert same(runner.run({"x": x}, BatchShape.decode(3)), x * 2)
    assert same(runner.run({"x": x}, BatchShape.decode(3, extra="threefold")), x * 3)
    assert same(runner.run({"x": x}, BatchShape.decode(3, extra="fourfold")), x * 2)
    assert runner.eager_steps == {Reason.NO_GRAPH_FOR_EXTRA: 1}
    runner.verify()


def test_speculative_batches_use_the_graphs_of_their_query_length(device):
    keys = capture_keys(GraphMode.FULL_DECODE_ONLY, Ladder([1, 2, 4]), None, query_len=3, max_reqs=MAX_REQS)
    runner = make(device, GraphMode.FULL_DECODE_ONLY, keys=keys, query_len=3)
    batch = batch_of(device, [3, 3, 3])
    shape = BatchShape.decode(3, 3)
    assert runner.decide(shape).descriptor == BatchDescriptor.decode(4, 3)
    out = runner.run(batch, shape)
    wanted = eager_padded(runner, batch, shape)
    assert same(out["hidden"], wanted["hidden"][:9])
    assert same(out["last"], wanted["last"][:3])


def test_without_graphs_the_reason_is_that_graphs_are_disabled(device):
    runner = make(device, GraphMode.NONE)
    runner.run(batch_of(device, [1]))
    assert runner.eager_steps == {Reason.DISABLED: 1}


def test_before_the_capture_the_reason_is_that_nothing_is_captured(device):
    buffers = InputBuffers(FIELDS, max_tokens=16, max_reqs=4, device=device)
    runner = CudaGraphRunner(step, buffers, capture_keys(GraphMode.FULL, DECODE, TOKENS, max_reqs=4))
    runner.run(batch_of(device, [1]))
    assert runner.eager_steps == {Reason.NOT_CAPTURED: 1}


def test_a_graph_taken_out_of_service_is_not_replayed_any_longer(device):
    counter = CallCounter(step)
    runner = make(device, GraphMode.FULL_DECODE_ONLY, counter=counter)
    batch = batch_of(device, [1, 1, 1])
    runner.run(batch)
    calls = counter.calls
    runner.dispatcher.mark_failed(GraphKey(GraphMode.FULL, BatchDescriptor.decode(4)), Reason.CAPTURE_FAILED)
    assert runner.decide(BatchShape.decode(3)).is_eager
    runner.run(batch)
    assert counter.calls == calls + 1
    assert runner.eager_steps == {Reason.CAPTURE_FAILED: 1}
