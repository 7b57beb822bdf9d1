"""Clause 2, the proof: hostile padding, sinks and dead outputs change no result."""

import pytest
import torch

from contract.steps import WIDTH, copies, eager_padded, ints, key, make_runner, mlp, randn, same, x_field
from ostinato.graphs import BatchDescriptor, Field, GraphMode, VerifyError, graphed


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE])
def test_results_do_not_change_under_poison(device, mode):
    model = mlp(device)
    runner = make_runner(device, lambda x: model(x), [2, 4, 8], mode=mode)
    for n in range(1, 9):
        batch = {"x": randn(n, WIDTH, device=device, seed=n)}
        runner.poison = False
        plain = runner.run(batch).clone()
        runner.poison = True
        assert same(runner.run(batch), plain), n


def test_poisoned_tails_are_large_finite_numbers_and_declared_indices(device):
    fields = [x_field(), Field("rows", torch.int64, pad=0, poison=3), Field("half", torch.float16)]
    runner = make_runner(device, lambda x, rows, half: x + rows[:, None] + half[:, None], [4], fields=fields)
    runner.poison = True
    half = torch.ones(1, dtype=torch.float16, device=device)
    runner.run({"x": randn(1, WIDTH, device=device), "rows": ints([1], device), "half": half})
    views = runner.buffers.views(BatchDescriptor.decode(4))
    for name in ("x", "half"):
        assert views[name][1:].isfinite().all()
        assert (views[name][1:] > 1e4).all()
    assert views["rows"].tolist() == [1, 3, 3, 3]
    runner.poison = False
    runner.run({"x": randn(1, WIDTH, device=device), "rows": ints([1], device), "half": half})
    assert views["rows"].tolist() == [1, 0, 0, 0]
    assert (views["x"][1:] == 0).all()


def test_sinks_are_filled_with_large_finite_numbers(device):
    sink = torch.zeros(WIDTH, device=device)
    runner = make_runner(device, lambda x: x * 2, [2], sinks={"page 0": sink})
    runner.poison = True
    runner.run({"x": randn(2, WIDTH, device=device)})
    assert sink.isfinite().all()
    assert (sink > 1e4).all()


def test_dead_outputs_hold_nan_before_a_poisoned_replay(device):
    read_later = torch.zeros(4, WIDTH, device=device)
    big = make_runner(device, lambda x: x + 1, [4], results="unguarded")
    dead = big.run({"x": randn(4, WIDTH, device=device)})
    small = make_runner(device, lambda x: read_later.copy_(dead)[:1] * 0 + x, [1], pool=big.pool)
    small.graphs.update(big.graphs)  # the same pool, and poison reaches the outputs of the runner's graphs
    small.poison = True
    small.run({"x": randn(1, WIDTH, device=device)})
    assert read_later.isnan().any()


def test_a_result_that_leans_on_the_sink_changes_under_poison_and_is_caught(device):
    page = torch.zeros(2, WIDTH, device=device)
    runner = make_runner(device, lambda x: x + page[0], [2], sinks={"page 0": page[0]})
    with pytest.raises(VerifyError, match="mixes rows"):
        runner.verify()
    assert (page == 0).all(), "verify put the sink back"


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x - x.mean(0),
        lambda x: x.softmax(0),
        lambda x: x.flip(0).clone(),
        lambda x: x @ (x.T @ x),
    ],
    ids=["mean", "softmax", "flip", "gram"],
)
def test_a_function_that_mixes_rows_is_caught_by_verify_which_says_so(device, mix):
    runner = make_runner(device, mix, [4])
    with pytest.raises(VerifyError, match="mixes rows"):
        runner.verify()
    f = graphed(mix, ladder=[4])
    f(randn(4, WIDTH, device=device))
    if f.report().graphs:  # zeros add nothing to a sum
        assert any(check.mixes_rows and check.passed for check in f.verify().checks)
    else:
        assert all("depends on the batch" in cause for cause in f.report().failures.values())


def test_a_function_that_mixes_rows_through_a_declared_index_is_caught(device):
    def counts(rows):
        return torch.zeros(4, device=device).index_add_(0, rows, torch.ones_like(rows, dtype=torch.float32))[
            rows
        ]

    fields = [Field("rows", torch.int64, pad=0, poison=3, sample=(3, 4))]
    with pytest.raises(VerifyError, match="mixes rows"):
        make_runner(device, counts, [6], fields=fields).verify()


def test_poison_leaves_the_batch_of_the_user_alone(device):
    runner = make_runner(device, lambda x: x * 2, [4])
    batch = {"x": randn(3, WIDTH, device=device)}
    before = copies(batch)
    runner.poison = True
    runner.run(batch)
    assert same(batch, before)
    runner.poison = False
    assert same(runner.run(batch), eager_padded(runner, batch)[:3])
    assert runner.graphs[key(4)].replays == 2
