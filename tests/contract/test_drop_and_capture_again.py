"""Graphs that go, and graphs that come later: memory, failures, and the batch in the buffers."""

import gc
import weakref

import pytest
import torch

from contract.steps import (
    WIDTH,
    is_recording,
    key,
    make_runner,
    randn,
    reasons,
    same,
    strictly,
    wrap,
    x_field,
)
from ostinato.graphs import (
    BatchError,
    BatchShape,
    CaptureOptions,
    ConfigError,
    CudaGraphRunner,
    GraphMode,
    InputBuffers,
)


def doubled(x):
    return x * 2 + 1


@pytest.fixture
def no_garbage_collection():
    """What dies, dies because nothing refers to it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# -- drop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE])
def test_dropping_everything_frees_graphs_and_memory_at_once(device, mode, no_garbage_collection):
    runner = make_runner(device, doubled, [2, 4], mode=mode)
    for n in (1, 2, 3, 4):
        runner.run({"x": randn(n, WIDTH, device=device)})
    graphs = [weakref.ref(graph) for graph in runner.graphs.values()]
    memory = weakref.ref(runner.pool.memory)
    assert runner.pool.bytes > 0
    runner.drop()
    assert [ref() for ref in graphs] == [None, None]
    assert memory() is None
    assert runner.pool.bytes == 0
    assert runner.graphs == {}


def test_dropping_one_graph_frees_that_one(device, no_garbage_collection):
    runner = make_runner(device, doubled, [2, 4])
    for n in (1, 2, 3, 4):
        runner.run({"x": randn(n, WIDTH, device=device)})
    two, four = (weakref.ref(runner.graphs[key(n)]) for n in (2, 4))
    runner.drop(key(2))
    assert two() is None
    assert four() is not None
    x = randn(1, WIDTH, device=device)
    assert same(runner.run({"x": x}), doubled(x)), "the larger graph serves it"
    assert reasons(runner) == {}


def test_dropped_graphs_serve_nothing(device):
    runner = make_runner(device, doubled, [2, 4])
    x = randn(3, WIDTH, device=device)
    runner.run({"x": x})
    runner.drop()
    assert same(runner.run({"x": x}), doubled(x))
    assert reasons(runner) == {"not-captured": 1}
    assert not runner.can_rerun(BatchShape.decode(3))
    runner.drop()


def test_dropping_a_graph_that_is_not_there_is_refused(device):
    runner = make_runner(device, doubled, [2, 4])
    for missing in (key(8), key(4, GraphMode.PIECEWISE)):
        with pytest.raises(ConfigError):
            runner.drop(missing)
    runner.drop(key(2))
    with pytest.raises(ConfigError):
        runner.drop(key(2))
    x = randn(3, WIDTH, device=device)
    assert same(runner.run({"x": x}), doubled(x))
    assert runner.report().replays == 1


def test_after_a_drop_outputs_are_learned_anew(device):
    tables = [randn(3, device=device)]
    runner = make_runner(device, lambda x: (x * 2, tables[0] * 1), [2, 4])
    x = randn(3, WIDTH, device=device)
    assert same(runner.run({"x": x}), (x * 2, tables[0]))
    for size in (5, 4, 2):
        tables[0] = randn(size, device=device, seed=size)
        runner.drop()
        runner.capture(progress=False)
        assert not runner.failures
        for n in (3, 1):
            x = randn(n, WIDTH, device=device, seed=n)
            assert same(runner.run({"x": x}), (x * 2, tables[0]))
    assert reasons(runner) == {}


def test_after_a_drop_a_result_may_have_become_another_kind(device):
    kinds = [lambda x: x * 2, lambda x: (x * 2, 7), lambda x: {"t": x.t()}, lambda x: x.sum(1)]
    runner = make_runner(device, lambda x: kinds[0](x), [2, 4])
    x = randn(3, WIDTH, device=device)
    while True:
        assert same(runner.run({"x": x}), kinds[0](x))
        kinds.pop(0)
        if not kinds:
            break
        runner.drop()
        runner.capture(progress=False)
        assert not runner.failures
    assert reasons(runner) == {}


def test_recapturing_a_wrapper_learns_its_outputs_anew(device):
    tables = [randn(3, device=device)]
    f = wrap(lambda x: (x * 2, tables[0] * 1))
    x = randn(3, WIDTH, device=device)
    assert same(f(x), (x * 2, tables[0]))
    for size in (5, 4):
        tables[0] = randn(size, device=device, seed=size)
        f.recapture()
        assert same(f(x), (x * 2, tables[0]))
    assert reasons(f) == {}


# -- a capture that raises -----------------------------------------------------------------------------


class Failing:
    """A step that cannot be recorded at some size, as long as it is told so."""

    def __init__(self, size=None):
        self.size = size

    def __call__(self, x):
        if is_recording() and x.size(0) == self.size:
            raise ValueError(f"no kernel for {self.size}")
        return x * 2


def replayed(runner, n, device):
    """Whether a right step of n rows came from a graph."""
    before = runner.report().replays
    x = randn(n, WIDTH, device=device, seed=n)
    assert same(runner.run({"x": x}), x * 2)
    return runner.report().replays > before


def failing_runner(device, size, sizes, capture=False):
    step = Failing(size)
    return step, make_runner(device, lambda x: step(x), sizes, capture=capture, options=strictly())


def test_a_capture_that_raises_serves_nothing(device):
    step, runner = failing_runner(device, 2, [2, 4, 8])
    with pytest.raises(ValueError, match="no kernel for 2"):
        runner.capture(progress=False)
    assert runner.graphs == {}
    assert len(runner.pool.graphs) == 0
    assert not any(replayed(runner, n, device) for n in (1, 2, 3, 4, 8))
    assert not runner.can_run(BatchShape.decode(4))
    step.size = None
    runner.capture(progress=False)
    assert all(replayed(runner, n, device) for n in (1, 2, 3, 4, 8))


def test_a_capture_that_raises_leaves_earlier_graphs_in_service(device):
    step, runner = failing_runner(device, None, [2, 4, 8], capture=True)
    runner.drop(key(8))
    runner.drop(key(2))
    step.size = 2
    with pytest.raises(ValueError, match="no kernel for 2"):
        runner.capture(progress=False)
    assert set(runner.graphs) == {key(4)}
    assert [replayed(runner, n, device) for n in (1, 2, 3, 4, 5, 8)] == [True] * 4 + [False] * 2
    step.size = None
    runner.capture(progress=False)
    assert all(replayed(runner, n, device) for n in (2, 4, 5, 8))


def test_outputs_that_cannot_be_cut_raise_and_leave_earlier_graphs_in_service(device):
    bad = []

    def step(x):
        return x.reshape(-1, 2) if bad and x.size(0) == 2 else x * 2

    runner = make_runner(device, step, [2, 4], options=strictly())
    runner.drop(key(2))
    bad.append(True)
    with pytest.raises(Exception, match="output"):
        runner.capture(progress=False)
    bad.clear()
    assert set(runner.graphs) == {key(4)}
    assert replayed(runner, 3, device)


# -- rerun ---------------------------------------------------------------------------------------------


THREE, TWO = BatchShape.decode(3), BatchShape.decode(2)


@pytest.fixture
def filled(device):
    """A runner whose buffers hold a batch of three."""
    runner = make_runner(device, doubled, [2, 4])
    runner.run({"x": randn(3, WIDTH, device=device)})
    assert runner.can_rerun(THREE)
    assert not runner.can_rerun(TWO)
    return runner


@pytest.mark.parametrize("size", [2, 4])
def test_trying_a_rung_out_ends_it(filled, size):
    filled.try_out(key(size))
    assert not filled.can_rerun(THREE)
    with pytest.raises(BatchError, match="do not hold"):
        filled.rerun(THREE)


def test_verifying_ends_it(filled):
    filled.verify()
    assert not filled.can_rerun(THREE)
    assert not filled.can_rerun(TWO)


def test_an_eager_step_ends_it(filled, device):
    filled.run({"x": randn(7, WIDTH, device=device)}, BatchShape.decode(7))
    assert not filled.can_rerun(THREE)


def test_filling_the_buffers_by_hand_ends_it(filled, device):
    descriptor = filled.decide(THREE).descriptor
    filled.buffers.fill({"x": randn(3, WIDTH, device=device, seed=5)}, THREE, descriptor)
    assert not filled.can_rerun(THREE)


def test_another_runner_on_the_same_buffers_ends_it(filled, device):
    other = CudaGraphRunner(
        lambda x: x - 1,
        filled.buffers,
        [key(2), key(4)],
        options=CaptureOptions(freeze_gc=False),
    )
    other.capture(progress=False)
    x, y = randn(3, WIDTH, device=device), randn(3, WIDTH, device=device, seed=1)
    filled.run({"x": x})
    other.run({"x": y})
    assert not filled.can_rerun(THREE)
    assert other.can_rerun(THREE)
    assert same(other.rerun(THREE), y - 1)
    filled.run({"x": x})
    assert not other.can_rerun(THREE)
    assert same(filled.rerun(THREE), doubled(x))


def test_another_runner_with_buffers_of_its_own_does_not(filled, device):
    other = make_runner(device, lambda x: x - 1, [2, 4], pool=filled.pool)
    filled.run({"x": randn(3, WIDTH, device=device)})
    other.run({"x": randn(3, WIDTH, device=device, seed=1)})
    assert filled.can_rerun(THREE)
    assert same(filled.rerun(THREE), doubled(randn(3, WIDTH, device=device)))


def test_replays_and_reruns_keep_it(filled, device):
    x = randn(3, WIDTH, device=device, seed=3)
    filled.replay({"x": x}, THREE, filled.decide(THREE))
    for _ in range(3):
        assert filled.can_rerun(THREE)
        assert same(filled.rerun(THREE), doubled(x))


# -- further keys --------------------------------------------------------------------------------------


def growing_runner(device, **settings):
    """A runner for up to eight rows that has a graph for four only."""
    buffers = InputBuffers([x_field()], max_tokens=8, device=device)
    settings.setdefault("options", CaptureOptions(freeze_gc=False))
    runner = CudaGraphRunner(doubled, buffers, [key(4)], **settings)
    runner.capture(progress=False)
    return runner


def test_further_keys_are_captured_when_they_are_wanted(device):
    runner = growing_runner(device)
    x = randn(7, WIDTH, device=device)
    assert same(runner.run({"x": x}), doubled(x))
    assert reasons(runner) == {"larger-than-max": 1}
    runner.capture(keys=[key(8), key(2)], progress=False)
    assert set(runner.graphs) == {key(2), key(4), key(8)}
    for n in (7, 3, 2, 1, 8):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(runner.run({"x": x}), doubled(x))
    assert reasons(runner) == {"larger-than-max": 1}
    assert [row.num_tokens for row in sorted(runner.report().graphs, key=lambda row: -row.num_tokens)] == [
        8,
        4,
        2,
    ]
    assert {row.num_tokens: row.replays for row in runner.report().graphs} == {8: 2, 4: 1, 2: 2}


def test_keys_that_have_a_graph_keep_it(device):
    runner = growing_runner(device)
    graph = runner.graphs[key(4)]
    runner.capture(keys=[key(4), key(2)], progress=False)
    assert runner.graphs[key(4)] is graph
    assert key(2) in runner.graphs


def test_a_further_key_that_does_not_fit_the_buffers_is_refused(device):
    runner = growing_runner(device)
    with pytest.raises(ConfigError):
        runner.capture(keys=[key(16)], progress=False)
    assert set(runner.graphs) == {key(4)}
    assert same(runner.run({"x": randn(3, WIDTH, device=device)}), doubled(randn(3, WIDTH, device=device)))


def test_capturing_further_keys_keeps_the_batch_that_lies_ready(device):
    runner = growing_runner(device)
    x = randn(3, WIDTH, device=device)
    before = runner.run({"x": x}).clone()
    runner.capture(keys=[key(8), key(2)], progress=False)
    assert set(runner.graphs) == {key(2), key(4), key(8)}
    assert runner.can_rerun(THREE)
    assert not runner.can_rerun(TWO)
    assert same(runner.rerun(THREE), before)
    for n in (7, 2, 3):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(runner.run({"x": x}), doubled(x))
    assert reasons(runner) == {}


def test_where_nothing_lay_ready_nothing_does_afterwards(device):
    runner = growing_runner(device)
    runner.capture(keys=[key(2)], progress=False)
    assert not runner.can_rerun(THREE)
    assert not runner.can_rerun(TWO)


def test_a_strict_capture_of_further_keys_that_raises_keeps_the_others(device):
    step = Failing()
    buffers = InputBuffers([x_field()], max_tokens=8, device=device)
    runner = CudaGraphRunner(lambda x: step(x), buffers, [key(4)], options=strictly())
    runner.capture(progress=False)
    step.size = 2
    with pytest.raises(ValueError, match="no kernel for 2"):
        runner.capture(keys=[key(8), key(2)], progress=False)
    assert set(runner.graphs) == {key(4)}
    assert replayed(runner, 3, device)
    assert not replayed(runner, 8, device)


def test_after_a_drop_only_the_keys_that_are_wanted_may_be_captured(device):
    runner = growing_runner(device)
    runner.drop()
    runner.capture(keys=[key(8)], progress=False)
    assert set(runner.graphs) == {key(8)}
    x = randn(3, WIDTH, device=device)
    assert torch.equal(runner.run({"x": x}), doubled(x))
    assert reasons(runner) == {}
