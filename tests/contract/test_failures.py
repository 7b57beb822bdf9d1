"""Clauses 7 and 8: nothing dies while capturing, and nothing is written before the decision."""

import json
from pathlib import Path

import pytest
import torch

from contract.steps import WIDTH, eager_padded, key, make_runner, randn, same, unchanged, x_field
from contract.steps import is_recording as recording_now
from ostinato.graphs import (
    BatchError,
    BatchShape,
    CaptureOptions,
    ConfigError,
    CudaGraphRunner,
    Field,
    GraphMode,
    GraphPool,
    InputBuffers,
    Reason,
    eager_boundary,
)

MODES = [GraphMode.FULL, GraphMode.PIECEWISE]


def failing_above(size: int, error: Exception):
    """A step that cannot be captured above a size and is fine eagerly."""

    def step(x):
        if recording_now() and x.size(0) > size:
            raise error
        return x * 2

    return step


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")


@pytest.mark.parametrize("mode", MODES)
def test_out_of_memory_sheds_the_large_rungs_and_the_rest_works(device, mode, caplog):
    runner = make_runner(
        device, failing_above(4, out_of_memory()), [1, 2, 4, 8, 16], mode=mode, capture=False
    )
    report = runner.capture(progress=False)
    assert set(runner.graphs) == {key(size, mode) for size in (1, 2, 4)}
    assert set(runner.failures) == {key(size, mode) for size in (8, 16)}
    assert len(report.failures) == 2
    assert all("Tried to allocate 3.00 GiB" in cause for cause in report.failures.values())
    [told] = [record.getMessage() for record in caplog.records if "out-of-memory" in record.getMessage()]
    assert all(str(key(size, mode).descriptor) in told for size in (8, 16)), "one warning for both"
    for n in range(1, 20):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(runner.run({"x": x}), x * 2), n
    assert runner.eager_steps == {Reason.OUT_OF_MEMORY: 12, Reason.LARGER_THAN_MAX: 3}
    assert runner.report().replays == 4


def test_out_of_memory_in_a_warm_up_sheds_the_rung_as_well(device):
    def step(x):
        if x.size(0) > 4:
            raise out_of_memory()
        return x * 2

    runner = make_runner(device, step, [4, 8], capture=False)
    runner.capture(progress=False)
    assert set(runner.graphs) == {key(4)}
    assert runner.decide(BatchShape.decode(6)).reason is Reason.OUT_OF_MEMORY


def test_out_of_memory_is_no_reason_to_raise_even_when_strict(device):
    options = CaptureOptions(strict=True)
    runner = make_runner(device, failing_above(4, out_of_memory()), [4, 8], options=options, capture=False)
    runner.capture(progress=False)
    assert set(runner.graphs) == {key(4)}


MEGABYTE = 1 << 20


def wide(x):
    """One megabyte of intermediates for every row."""
    return x[:, :1].expand(-1, MEGABYTE // 4).mul(2).sum(1)


def test_a_budget_sheds_what_would_exceed_it_and_keeps_what_fits(device):
    pool = GraphPool(device, budget=64 * MEGABYTE)
    runner = make_runner(device, wide, [2, 128], pool=pool, capture=False)
    report = runner.capture(progress=False)
    assert set(runner.graphs) == {key(2)}
    assert "budget" in runner.failures[key(128)]
    assert pool.bytes <= 64 * MEGABYTE
    assert report.pool_bytes == pool.bytes > 0
    assert runner.decide(BatchShape.decode(100)).reason is Reason.OUT_OF_MEMORY
    x = randn(2, WIDTH, device=device)
    assert same(runner.run({"x": x}), wide(x))


def test_within_the_budget_small_graphs_share_the_memory_of_the_largest(device):
    pool = GraphPool(device, budget=64 * MEGABYTE)
    runner = make_runner(device, wide, [2, 8, 16], pool=pool)
    assert 16 * MEGABYTE <= sum(row.bytes for row in runner.report().graphs) < 24 * MEGABYTE
    assert pool.bytes <= 64 * MEGABYTE


@pytest.mark.parametrize("mode", MODES)
def test_a_rung_that_fails_is_reported_and_served_by_the_next_larger_one(device, mode):
    def step(x):
        if recording_now() and x.size(0) == 4:
            raise ValueError("no kernel for four")
        return x * 2

    runner = make_runner(device, step, [2, 4, 8], mode=mode, capture=False)
    report = runner.capture(progress=False)
    assert set(runner.graphs) == {key(size, mode) for size in (2, 8)}
    assert report.failures.keys() == {f"{mode} {key(4, mode).descriptor}"}
    [cause] = report.failures.values()
    assert cause.startswith("ValueError: no kernel for four")
    assert f"{Path(__file__).name}:{step.__code__.co_firstlineno + 2} in step" in cause
    x = randn(4, WIDTH, device=device)
    assert runner.decide(BatchShape.decode(4)).descriptor == key(8, mode).descriptor
    assert same(runner.run({"x": x}), x * 2)
    assert runner.graphs[key(8, mode)].replays == 1
    assert not runner.eager_steps


@pytest.mark.parametrize("mode", MODES)
def test_where_no_larger_rung_is_left_batches_run_eagerly_because_the_capture_failed(device, mode):
    runner = make_runner(device, failing_above(4, ValueError("no")), [2, 4, 8], mode=mode, capture=False)
    runner.capture(progress=False)
    x = randn(7, WIDTH, device=device)
    assert same(runner.run({"x": x}), x * 2)
    assert runner.eager_steps == {Reason.CAPTURE_FAILED: 1}
    assert not runner.can_run({"x": x})
    assert runner.can_run({"x": x[:4]})


@pytest.mark.parametrize("mode", MODES)
def test_strict_raises_the_cause_and_the_next_capture_works(device, mode):
    error = ValueError("no")
    armed = [True]

    @eager_boundary
    def boundary(x):
        return x + 1

    def step(x):
        y = boundary(x)
        if recording_now() and armed:
            raise error
        return y * 2

    runner = make_runner(device, step, [2, 4], mode=mode, options=CaptureOptions(strict=True), capture=False)
    with pytest.raises(ValueError, match="no") as caught:
        runner.capture(progress=False)
    assert caught.value is error
    assert runner.graphs == {}
    armed.clear()
    runner.capture(progress=False)
    batch = {"x": randn(3, WIDTH, device=device)}
    assert same(runner.run(batch), eager_padded(runner, batch)[:3])


def test_a_second_capture_takes_up_what_failed_and_forgets_the_failure(device):
    armed = [True]

    def step(x):
        if recording_now() and armed and x.size(0) == 4:
            raise ValueError("no")
        return x * 2

    runner = make_runner(device, step, [2, 4], capture=False)
    runner.capture(progress=False)
    small = runner.graphs[key(2)]
    armed.clear()
    report = runner.capture(progress=False)
    assert not report.failures
    assert runner.graphs[key(2)] is small, "a graph that existed was captured again"
    assert runner.decide(BatchShape.decode(3)).descriptor == key(4).descriptor


def test_an_interrupt_ends_the_capture_and_the_runner_can_go_on(device):
    armed = [True]

    def step(x):
        if recording_now() and armed and x.size(0) == 2:
            raise KeyboardInterrupt
        return x * 2

    runner = make_runner(device, step, [2, 4], capture=False)
    with pytest.raises(KeyboardInterrupt):
        runner.capture(progress=False)
    assert not recording_now()
    armed.clear()
    runner.capture(progress=False)
    x = randn(2, WIDTH, device=device)
    assert same(runner.run({"x": x}), x * 2)


def test_a_key_the_dispatcher_cannot_use_is_refused_before_anything_is_captured(device):
    pool = GraphPool(device)
    buffers = InputBuffers([x_field()], max_tokens=2, device=device)
    with pytest.raises(ConfigError, match="piecewise"):
        CudaGraphRunner(lambda x: x * 2, buffers, [key(2, GraphMode.PIECEWISE)], pool=pool)
    assert (len(pool.graphs), pool.bytes) == (0, 0)


def bad_batches(device, n):
    good = randn(n, WIDTH, device=device)
    return {
        "shape": {"x": good[:, :4], "y": good},
        "dtype": {"x": good, "y": good.double()},
        "rows": {"x": good, "y": good[:2]},
        "missing": {"x": good},
        "unknown": {"x": good, "y": good, "z": good},
        "list": {"x": good, "y": [[1.0] * WIDTH] * n},
    }


@pytest.mark.parametrize("what", ["shape", "dtype", "rows", "missing", "unknown", "list"])
@pytest.mark.parametrize("n", [3, 9], ids=["replay", "eager"])
def test_a_bad_batch_leaves_buffers_state_and_counts_as_they_were(device, what, n):
    state = torch.zeros((), device=device)
    fields = [x_field(), Field("y", torch.float32, (WIDTH,))]
    runner = make_runner(device, lambda x, y: x + y + state.add_(1), [4], fields=fields)
    good = {"x": randn(n, WIDTH, device=device), "y": randn(n, WIDTH, device=device)}
    runner.run(good)
    report, generation = runner.report(), runner.pool.generation
    with unchanged(runner.buffers.arena, state):
        with pytest.raises(BatchError):
            runner.run(bad_batches(device, n)[what])
    assert runner.report() == report
    assert runner.pool.generation == generation
    runner.run(good)


def test_the_reasons_of_eager_steps_are_counted_and_shown(device):
    runner = make_runner(
        device, failing_above(4, ValueError("no kernel for eight")), [2, 4, 8], capture=False
    )
    runner.capture(progress=False)
    for n in (1, 3, 4, 6, 7, 9):
        runner.run({"x": randn(n, WIDTH, device=device)})
    report = runner.report()
    assert report.eager_steps == {"capture-failed": 2, "larger-than-max": 1}
    assert report.replays == 3
    text = str(report)
    for shown in ("capture-failed 2", "larger-than-max 1", "no kernel for eight", "decode 8x1", "replays 3"):
        assert shown in text, shown
    data = json.loads(report.json())
    assert data["eager_steps"] == {"capture-failed": 2, "larger-than-max": 1}
    assert data["failures"].keys() == {"full decode 8x1"}
    assert data["failures"]["full decode 8x1"].startswith("ValueError: no kernel for eight")
    assert data["totals"]["eager_steps"] == 3
    assert data["totals"]["replays"] == 3
