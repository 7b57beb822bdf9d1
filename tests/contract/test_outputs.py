"""Clause 3: outputs that are not copied live in shared memory until the next replay of the pool."""

import pytest
import torch

from contract.steps import WIDTH, make_runner, mlp, randn, same
from ostinato.graphs import CaptureOptions, GraphMode, GraphPool, StaleOutputError, graphed


def doubled(x):
    return x * 2 + 1


def test_another_graphs_replay_overwrites_a_dead_output(device):
    runner = make_runner(device, doubled, [2, 4], results="unguarded")
    first = runner.run({"x": randn(2, WIDTH, device=device)})
    kept = first.clone()
    runner.run({"x": randn(4, WIDTH, device=device, seed=1)})
    assert not same(first, kept)


def test_a_runner_of_the_same_pool_overwrites_it_too_and_one_of_another_pool_does_not(device):
    pool = GraphPool(device)
    one, two = (make_runner(device, doubled, [4], pool=pool, results="unguarded") for _ in range(2))
    apart = make_runner(device, doubled, [4], results="unguarded")
    first = one.run({"x": randn(4, WIDTH, device=device)})
    kept = first.clone()
    apart.run({"x": randn(4, WIDTH, device=device, seed=1)})
    assert same(first, kept)
    two.run({"x": randn(4, WIDTH, device=device, seed=1)})
    assert not same(first, kept)


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE])
def test_strong_outputs_last_until_their_own_graphs_next_replay(device, mode):
    options = CaptureOptions(weak_output=False)
    runner = make_runner(device, doubled, [1, 2, 4], options=options, mode=mode, results="unguarded")
    first = runner.run({"x": randn(4, WIDTH, device=device)})
    kept = first.clone()
    second = runner.run({"x": randn(2, WIDTH, device=device, seed=1)})
    kept_second = second.clone()
    runner.run({"x": randn(1, WIDTH, device=device, seed=2)})
    assert same(first, kept)
    assert same(second, kept_second)
    runner.run({"x": randn(4, WIDTH, device=device, seed=3)})
    assert not same(first, kept)


def test_strong_outputs_are_not_in_memory_that_an_earlier_graph_works_in(device):
    def step(x):
        if x.size(0) < 4:
            return x * 2
        parts = [x + i for i in range(6)]
        return torch.stack(parts).sum(0)

    options = CaptureOptions(weak_output=False)
    runner = make_runner(device, step, [1, 2, 4], options=options, results="unguarded")
    outputs = [runner.run({"x": randn(n, WIDTH, device=device, seed=n)}) for n in (1, 2)]
    kept = [output.clone() for output in outputs]
    runner.run({"x": randn(4, WIDTH, device=device)})
    assert same(outputs, kept)


def test_what_a_graph_copies_into_a_static_buffer_outlives_other_replays(device):
    lasting = torch.zeros(4, WIDTH, device=device)

    def keep(x):
        y = doubled(x)
        lasting[: x.size(0)].copy_(y)
        return y

    runner = make_runner(device, keep, [4])
    other = make_runner(device, doubled, [4], pool=runner.pool)
    x = randn(4, WIDTH, device=device)
    runner.run({"x": x})
    other.run({"x": randn(4, WIDTH, device=device, seed=1)})
    assert same(lasting, doubled(x))


@pytest.fixture
def guarded(device):
    def step(x):
        return {"y": doubled(x), "more": (x.sum(1), None)}

    runner = make_runner(device, step, [2, 4], results="guarded")
    return runner, lambda n: {"x": randn(n, WIDTH, device=device, seed=n)}


def test_a_guard_names_the_graph_whose_stale_output_is_used(guarded):
    runner, batch = guarded
    out = runner.run(batch(3))
    out["y"] + 1
    runner.run(batch(2))
    for use in (
        lambda: out["y"] + 1,
        lambda: out["y"].sum(),
        lambda: torch.relu(out["more"][0]),
        lambda: out["y"].clone(),
        lambda: out["y"].cpu(),
        lambda: torch.cat([out["y"], out["y"]]),
        lambda: out["y"].tolist(),
    ):
        with pytest.raises(StaleOutputError, match=r"full graph decode 4x1"):
            use()


def test_a_guard_sees_through_views_of_a_stale_output(guarded):
    runner, batch = guarded
    out = runner.run(batch(4))
    views = [
        out["y"][1:],
        out["y"].view(-1),
        out["y"].t(),
        out["y"][0][2:],
        out["y"].detach(),
        *out["y"].unbind(0),
    ]
    runner.run(batch(4))
    for view in views:
        with pytest.raises(StaleOutputError, match="decode 4x1"):
            view.sum()


def test_a_graphs_own_next_replay_makes_its_output_stale_as_well(guarded):
    runner, batch = guarded
    out = runner.run(batch(2))
    runner.run(batch(2))
    with pytest.raises(StaleOutputError, match="decode 2x1"):
        out["y"].sum()


def test_copies_and_results_computed_in_time_are_ordinary_tensors(guarded):
    runner, batch = guarded
    out = runner.run(batch(4))
    copied, computed = out["y"].clone(), out["y"] * 2
    values = copied.tolist()
    runner.run(batch(2))
    assert copied.tolist() == values
    assert same(computed, copied * 2)
    assert type(copied) is torch.Tensor


def test_a_fresh_output_may_be_fed_to_the_next_step(device):
    runner = make_runner(device, doubled, [4], results="guarded")
    x = randn(4, WIDTH, device=device)
    out = runner.run({"x": x})
    out = runner.run({"x": out})
    assert same(out.clone(), doubled(doubled(x)))


def test_a_capture_into_the_pool_makes_earlier_outputs_stale(device):
    runner = make_runner(device, doubled, [4], results="guarded")
    out = runner.run({"x": randn(4, WIDTH, device=device)})
    make_runner(device, doubled, [4], pool=runner.pool)
    with pytest.raises(StaleOutputError):
        out.sum()


def test_strong_outputs_are_stale_after_their_own_graphs_next_replay_only(device):
    options = CaptureOptions(weak_output=False)
    runner = make_runner(device, doubled, [2, 4], results="guarded", options=options)
    out = runner.run({"x": randn(4, WIDTH, device=device)})
    kept = out.clone()
    runner.run({"x": randn(2, WIDTH, device=device)})
    assert same(out.clone(), kept)
    runner.run({"x": randn(3, WIDTH, device=device)})
    with pytest.raises(StaleOutputError, match="decode 4x1"):
        out.sum()


def test_debug_mode_guards_what_is_unguarded_otherwise(device):
    runner = make_runner(device, doubled, [4], results="unguarded", debug=True)
    out = runner.run({"x": randn(4, WIDTH, device=device)})
    runner.run({"x": randn(4, WIDTH, device=device)})
    with pytest.raises(StaleOutputError, match="decode 4x1"):
        out.sum()


def test_guarded_results_of_a_wrapper_are_stale_after_its_next_call(device):
    f = graphed(mlp(device), ladder=[2, 4], results="guarded")
    x = randn(3, WIDTH, device=device)
    with torch.no_grad():
        stale = f(x)
        again = f(x)
        with pytest.raises(StaleOutputError, match="decode 4x1"):
            stale.sum()
        again.sum()


def test_an_output_that_is_an_input_shows_the_batch_of_the_replay(device):
    runner = make_runner(device, lambda x: (x, x[:, 1:]), [4])
    for seed in range(3):
        x = randn(3, WIDTH, device=device, seed=seed)
        assert same(runner.run({"x": x}), (x, x[:, 1:]))
