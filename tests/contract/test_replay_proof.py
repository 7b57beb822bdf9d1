"""A replay is a replay: Python stands still, addresses are fixed, memory is shared."""

import torch

from contract.steps import WIDTH, CallCounter, key, make_runner, randn, same


def test_python_does_not_run_during_a_replay(device):
    step = CallCounter(lambda x: x * 2)
    runner = make_runner(device, step, [1, 2, 4])
    calls = step.calls
    for n in (1, 2, 3, 4, 3, 2, 1):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(runner.run({"x": x}), x * 2)
    assert step.calls == calls
    runner.run({"x": randn(5, WIDTH, device=device)})
    assert step.calls == calls + 1, "an eager step is a call"


def test_a_python_value_is_frozen_at_its_value_while_recording(device):
    scale = [2.0]
    runner = make_runner(device, lambda x: x * scale[0], [2])
    scale[0] = 100.0
    x = randn(2, WIDTH, device=device)
    assert same(runner.run({"x": x}), x * 2)


def test_an_input_that_bypasses_the_buffers_gives_the_stale_answer(device):
    outside = torch.ones(2, WIDTH, device=device)
    held = [outside]
    runner = make_runner(device, lambda x: x + held[0], [2])
    x = randn(2, WIDTH, device=device)
    held[0] = torch.full((2, WIDTH), 100.0, device=device)
    assert same(runner.run({"x": x}), x + 1)
    outside.fill_(5)
    assert same(runner.run({"x": x}), x + 5)


def test_launching_without_a_fill_computes_on_what_the_buffers_still_hold(device):
    runner = make_runner(device, lambda x: x * 2, [2], results="unguarded")
    x = randn(2, WIDTH, device=device)
    out = runner.run({"x": x})
    out.zero_()
    runner.launch(runner.graphs[key(2)])
    assert same(out, x * 2)
    runner.buffers.views(key(2).descriptor)["x"].fill_(21)
    runner.launch(runner.graphs[key(2)])
    assert (out == 42).all()


def test_outputs_are_at_the_same_address_every_time(device):
    runner = make_runner(device, lambda x: x * 2, [2, 4], results="unguarded")
    addresses = {n: runner.run({"x": randn(n, WIDTH, device=device)}).data_ptr() for n in (2, 4)}
    for n in (4, 2, 2, 4):
        assert runner.run({"x": randn(n, WIDTH, device=device)}).data_ptr() == addresses[n]


def test_a_replay_of_one_graph_clobbers_the_dead_output_of_another(device):
    runner = make_runner(device, lambda x: x * 2, [2, 4], results="unguarded")
    ones = torch.ones(2, WIDTH, device=device)
    dead = runner.run({"x": ones})
    assert (dead == 2).all()
    runner.run({"x": torch.full((4, WIDTH), 50.0, device=device)})
    assert (dead == 100).all(), "the two graphs do not share memory"


def test_shapes_and_branches_are_frozen_while_values_are_not(device):
    taken = []

    def step(x):
        taken.append(x.size(0))
        return torch.where(x > 0, x, -x) if x.size(0) > 2 else x * 0

    runner = make_runner(device, step, [2, 4])
    taken.clear()
    x = randn(3, WIDTH, device=device)
    assert same(runner.run({"x": x}), x.abs())
    assert same(runner.run({"x": x[:2]}), x[:2] * 0)
    assert taken == []


def test_the_largest_rung_is_captured_first(device):
    order = []

    def step(x):
        order.append(x.size(0))
        return x * 2

    make_runner(device, step, [1, 8, 2, 4])
    assert order == sorted(order, reverse=True)


def test_dropped_graphs_no_longer_serve(device):
    step = CallCounter(lambda x: x * 2)
    runner = make_runner(device, step, [2, 4])
    runner.drop(key(4))
    calls = step.calls
    runner.run({"x": randn(2, WIDTH, device=device)})
    assert step.calls == calls
    runner.run({"x": randn(4, WIDTH, device=device)})
    assert step.calls == calls + 1
    runner.drop()
    assert runner.graphs == {}
    assert runner.pool.bytes == 0
    runner.run({"x": randn(1, WIDTH, device=device)})
    runner.capture(progress=False)
    x = randn(4, WIDTH, device=device)
    assert same(runner.run({"x": x}), x * 2)
