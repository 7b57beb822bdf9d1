"""Clause 5: nothing is captured outside an explicit gate, nor inside a capture."""

import threading

import pytest
import torch

from contract.steps import (
    WIDTH,
    CallCounter,
    is_recording,
    key,
    make_runner,
    randn,
    same,
    unchanged,
)
from ostinato.graphs import CaptureError, CaptureOptions, capture_gate


def works(device):
    """A following good capture and replay."""
    runner = make_runner(device, lambda x: x * 2, [2])
    x = randn(2, WIDTH, device=device)
    return same(runner.run({"x": x}), x * 2)


def test_capture_outside_the_gate_is_refused_and_changes_nothing(device):
    state = torch.zeros((), device=device)
    step = CallCounter(lambda x: x + state.add_(1))
    runner = make_runner(device, step, [2, 4], capture=False)
    runner.buffers.arena.fill_(0x2A)
    generation = runner.pool.generation
    with unchanged(state, runner.buffers.arena, rng=device):
        with pytest.raises(CaptureError, match="outside the gate"):
            runner.capture_one(key(4))
    assert step.calls == 0, "warm-ups ran for a capture that was not allowed"
    assert (runner.graphs, runner.failures) == ({}, {})
    assert runner.pool.generation == generation
    assert runner.decide(runner.buffers.shape_of({"x": randn(4, WIDTH, device=device)})).is_eager
    assert works(device)


def test_inside_the_gate_one_graph_can_be_captured(device):
    runner = make_runner(device, lambda x: x * 3, [2], capture=False)
    with capture_gate():
        graph = runner.capture_one(key(2))
    runner.buffers.views(key(2).descriptor)["x"].fill_(2)
    runner.launch(graph)
    assert (graph.leaves[0] == 6).all()


def test_the_gate_closes_again_after_success_and_after_an_exception(device):
    runner = make_runner(device, lambda x: x * 3, [2])
    with pytest.raises(CaptureError, match="outside the gate"):
        runner.capture_one(key(2))
    with pytest.raises(ZeroDivisionError), capture_gate():
        raise ZeroDivisionError
    with pytest.raises(CaptureError, match="outside the gate"):
        runner.capture_one(key(2))


def test_the_gate_is_open_for_its_own_thread_only(device):
    runner = make_runner(device, lambda x: x * 3, [2], capture=False)
    caught = []

    def elsewhere():
        try:
            runner.capture_one(key(2))
        except CaptureError as error:
            caught.append(str(error))

    with capture_gate():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert len(caught) == 1
    assert "outside the gate" in caught[0]


@pytest.mark.parametrize("warmups", [0, 2])
def test_capture_inside_capture_is_refused_and_changes_nothing(device, warmups):
    inner = make_runner(device, lambda x: x * 2, [2], capture=False)
    state = torch.zeros((), device=device)

    def outer_step(x):
        state.add_(1)
        if is_recording():
            inner.capture(progress=False)
        return x + state

    options = CaptureOptions(warmups=warmups, strict=True)
    outer = make_runner(device, outer_step, [2], capture=False, options=options)
    with unchanged(state, rng=device):
        with pytest.raises(CaptureError, match="capture inside capture"):
            outer.capture(progress=False)
    assert (outer.graphs, inner.graphs) == ({}, {})
    assert works(device)
    inner.capture(progress=False)
    assert list(inner.graphs) == [key(2)]


def test_opening_the_gate_while_recording_is_refused(device):
    def step(x):
        if is_recording():
            with capture_gate():
                pass
        return x * 2

    runner = make_runner(device, step, [2], capture=False, options=CaptureOptions(strict=True))
    with pytest.raises(CaptureError, match="capture inside capture"):
        runner.capture(progress=False)
    assert works(device)


def test_serving_never_captures(device):
    step = CallCounter(lambda x: x * 2)
    runner = make_runner(device, step, [2, 4])
    graphs = dict(runner.graphs)
    for n in (1, 2, 3, 4, 5, 9):
        runner.run({"x": randn(n, WIDTH, device=device)})
    assert runner.graphs == graphs
