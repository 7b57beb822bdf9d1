"""What the report says, and what verification checks and leaves alone."""

import json

import pytest
import torch

from contract.steps import WIDTH, ints, key, make_runner, mlp, randn, same, unchanged, x_field
from ostinato.graphs import CaptureOptions, Field, GraphMode, VerifyError, eager_boundary


def test_the_report_counts_replays_and_padding_per_graph(device):
    runner = make_runner(
        device, mlp(device).forward, [2, 8], fields=[Field("input", torch.float32, (WIDTH,))]
    )
    for n in (1, 2, 4, 6, 9):
        runner.run({"input": randn(n, WIDTH, device=device)})
    report = runner.report()
    small, large = sorted(report.graphs, key=lambda row: row.num_tokens)
    assert (small.replays, large.replays) == (2, 2)
    assert small.padding_waste == pytest.approx(1 / 4)
    assert large.padding_waste == pytest.approx(6 / 16)
    assert report.padding_waste == pytest.approx(7 / 20)
    assert report.replays == 4
    data = json.loads(report.json())
    assert data["totals"]["graphs"] == 2
    assert data["totals"]["padding_waste"] == pytest.approx(7 / 20)
    assert [row["num_tokens"] for row in data["graphs"]] == [8, 2]
    assert data["device"] == str(device)
    text = str(report)
    for shown in ("decode 8x1", "decode 2x1", "replays 4", "larger-than-max 1", report.backend):
        assert shown in text, shown


def test_a_report_is_a_snapshot(device):
    runner = make_runner(device, lambda x: x * 2, [2])
    before = runner.report()
    runner.run({"x": randn(2, WIDTH, device=device)})
    assert (before.replays, runner.report().replays) == (0, 1)


def test_the_report_tells_segments_nodes_bytes_and_time(device):
    @eager_boundary
    def attend(h):
        return h * 2

    runner = make_runner(device, lambda x: attend(x + 1) + 1 - 3, [2, 4], mode=GraphMode.PIECEWISE)
    for row in runner.report().graphs:
        assert (row.mode, row.segments) == ("piecewise", 2)
        assert row.nodes is None or row.nodes == 3
        assert row.capture_ms > 0
    assert runner.report().pool_bytes > 0
    assert runner.report().input_bytes >= 4 * WIDTH * 4
    assert runner.report().graphs[0].bytes > 0


def test_the_debug_log_has_a_line_for_every_graph(device, caplog):
    caplog.set_level("INFO", logger="ostinato.graphs")
    make_runner(device, lambda x: x * 2, [2, 4], options=CaptureOptions(debug_log=True))
    messages = [record.getMessage() for record in caplog.records]
    assert sum("captured" in message and "decode" in message for message in messages) == 2


def test_the_raw_graph_is_kept_on_request_only(device):
    kept = make_runner(device, lambda x: x * 2, [2], options=CaptureOptions(keep_graph=True))
    assert kept.graphs[key(2)].recorded.raw
    x = randn(2, WIDTH, device=device)
    assert same(kept.run({"x": x}), x * 2)
    assert make_runner(device, lambda x: x * 2, [2]).graphs[key(2)].recorded.raw is None


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE])
def test_verify_checks_every_graph_full_and_mostly_padding(device, mode):
    model = mlp(device)
    runner = make_runner(device, lambda x: model(x), [1, 3, 9], mode=mode)
    outcome = runner.verify()
    assert outcome.passed
    assert len(outcome.checks) == 5
    assert set(outcome.max_error) == {f"{mode} {key(size, mode).descriptor}" for size in (1, 3, 9)}
    assert max(outcome.max_error.values()) <= 1e-6
    assert outcome.table().row_count == 5


def test_verify_leaves_state_counts_and_sinks_alone(device):
    counter, cache = torch.zeros((), device=device), randn(5, WIDTH, device=device)

    def step(x, slots):
        counter.add_(1)
        cache.index_put_((slots,), x)
        return cache[slots] * 2 + torch.rand_like(x)

    fields = [x_field(), Field("slots", torch.int64, sample=(1, 5))]
    runner = make_runner(device, step, [4], fields=fields, sinks={"row 0": cache[0]})

    def distinct(shape, generator):
        slots = torch.randperm(4, generator=generator)[: shape.num_tokens] + 1
        return {"x": torch.randn(shape.num_tokens, WIDTH, generator=generator), "slots": slots}

    report = runner.report()
    with unchanged(counter, cache, rng=device):
        assert runner.verify(make_batch=distinct).passed
    assert runner.report() == report
    out = runner.run({"x": randn(1, WIDTH, device=device), "slots": ints([2], device)})
    assert out.isfinite().all()


def test_verify_fails_loudly_and_names_the_graph_and_the_error(device):
    scale = [2.0]
    runner = make_runner(device, lambda x: x * scale[0], [2, 4])
    scale[0] = 2.5
    with pytest.raises(VerifyError, match=r"full decode 4x1 with decode 4x1: error 0\.\d+"):
        runner.verify()


def test_verify_compares_integers_and_booleans_exactly(device):
    offset = [0]

    def step(x):
        return (x > 0) ^ bool(offset[0]), (x * 1000).to(torch.int64) + offset[0]

    runner = make_runner(device, step, [4])
    assert runner.verify().passed
    offset[0] = 1
    with pytest.raises(VerifyError):
        runner.verify(tolerance=0.0)


def test_verify_finds_a_result_of_another_shape_or_structure(device):
    wide = [False]
    runner = make_runner(device, lambda x: (x * 2, x) if wide[0] else (x * 2,), [2])
    wide[0] = True
    with pytest.raises(VerifyError):
        runner.verify()


def test_verify_draws_other_inputs_from_another_seed_and_the_same_from_the_same(device):
    seen = []

    def make(shape, generator):
        batch = {"x": torch.randn(shape.num_tokens, WIDTH, generator=generator)}
        seen.append(batch["x"].sum().item())
        return batch

    runner = make_runner(device, lambda x: x * 2, [2])
    for seed in (1, 1, 2):
        runner.verify(make_batch=make, seed=seed)
    half = len(seen) // 3
    assert seen[:half] == seen[half : 2 * half] != seen[2 * half :]


def test_a_tolerance_can_be_given(device):
    scale = [1.0]
    runner = make_runner(device, lambda x: x * scale[0], [2])
    scale[0] = 1.01
    with pytest.raises(VerifyError):
        runner.verify()
    assert runner.verify(tolerance=0.1).passed
