"""A step whose inputs have not changed runs again without a copy; warm-ups may be shared between rungs."""

import pytest
import torch

from contract.steps import WIDTH, make_runner, randn, same, x_field
from ostinato.graphs import (
    BatchError,
    BatchShape,
    CaptureOptions,
    CudaGraphRunner,
    Dispatcher,
    Field,
    InputBuffers,
    Ladder,
    capture_keys,
)
from ostinato.graphs.capturing.gate import is_recording

ROWS = Field("rows", torch.int64)


def counting_runner(device, sizes=(2, 4), **options):
    """A step that reads and advances what its rows have on the device; row 0 is padding's."""
    state = torch.zeros(8, dtype=torch.int64, device=device)

    def step(rows):
        values = state.index_select(0, rows)
        state.index_add_(0, rows, (rows != 0).long())
        return values

    return make_runner(device, step, list(sizes), fields=[ROWS], **options), state


def test_rerun_continues_from_the_device(device):
    runner, state = counting_runner(device)
    rows = torch.tensor([3, 5, 6])
    shape = BatchShape.decode(3)
    assert runner.run({"rows": rows}, shape).tolist() == [0, 0, 0]
    for count in range(1, 5):
        assert runner.can_rerun(shape)
        assert runner.rerun(shape).tolist() == [count] * 3
    assert state.tolist() == [0, 0, 0, 5, 0, 5, 5, 0]
    [graph] = [graph for graph in runner.report().graphs if graph.num_tokens == 4]
    assert graph.replays == 5
    assert runner.report().eager_steps == {}


def test_a_batch_that_is_not_in_the_buffers_cannot_run_again(device):
    runner, _ = counting_runner(device)
    three, four, five = BatchShape.decode(3), BatchShape.decode(4), BatchShape.decode(5)
    assert not runner.can_rerun(three), "nothing ran yet"
    runner.run({"rows": torch.tensor([1, 2, 3])}, three)
    assert not runner.can_rerun(four), "the same graph, but its last row is padding"
    with pytest.raises(BatchError, match="do not hold a batch"):
        runner.rerun(four)
    runner.run({"rows": torch.tensor([1, 2])}, BatchShape.decode(2))
    assert not runner.can_rerun(three), "another rung has used the buffers"
    runner.run({"rows": torch.tensor([1, 2, 3, 4, 5])}, five)
    assert not runner.can_rerun(five), "an eager step leaves nothing in the buffers"


def test_what_a_capture_leaves_in_the_buffers_is_no_batch(device):
    runner, _ = counting_runner(device)
    shape = BatchShape.decode(2)
    runner.run({"rows": torch.tensor([1, 2])}, shape)
    runner.drop()
    runner.capture(progress=False)
    assert not runner.can_rerun(shape)


def test_poison_needs_fresh_padding(device):
    runner, _ = counting_runner(device)
    shape = BatchShape.decode(3)
    runner.run({"rows": torch.tensor([1, 2, 3])}, shape)
    runner.poison = True
    assert not runner.can_rerun(shape)
    runner.run({"rows": torch.tensor([1, 2, 3])}, shape)
    runner.poison = False
    assert not runner.can_rerun(shape), "the tail is poisoned still"


def test_of_graphs_of_one_size_with_the_same_kernels_the_last_is_warmed_up(device):
    """The one with adapters is captured first, because it takes more memory; the other has less to do."""
    seen = []

    def step(x, descriptor):
        seen.append((x.size(0), descriptor.lora, is_recording()))
        return x * 2

    keys = capture_keys("full-decode-only", Ladder([2, 4]), None, max_reqs=4, lora_cases=(0, 3))
    kernels = {"kernels_of": lambda key: key.descriptor.num_tokens}
    options = {"options": CaptureOptions(warmups=1, freeze_gc=False), **kernels}
    for state, warmed in (({}, 0), (None, 3)):
        seen.clear()
        buffers = InputBuffers([x_field()], max_tokens=4, device=device)
        runner = CudaGraphRunner(step, buffers, keys, dispatcher=Dispatcher("full"), state=state, **options)
        runner.capture(progress=False)
        recorded = [(4, 3, True), (4, 0, True), (2, 3, True), (2, 0, True)]
        assert [call for call in seen if call[2]] == recorded
        assert [call for call in seen if not call[2]] == [(4, warmed, False), (2, warmed, False)]
        assert len(runner.graphs) == 4


def test_rungs_with_the_same_kernels_are_warmed_up_once(device):
    warm, recorded = [], []

    def step(x):
        (recorded if is_recording() else warm).append(x.size(0))
        return x * 2

    options = {"kernels_of": lambda key: key.descriptor.num_tokens > 3}
    runner = make_runner(device, step, [1, 2, 3, 4, 5], **options)
    per_class = runner.options.warmups
    assert per_class > 0
    assert warm.count(5) == per_class
    assert warm.count(3) == per_class
    assert not {1, 2, 4} & set(warm)
    assert sorted(recorded) == [1, 2, 3, 4, 5]
    x = randn(2, WIDTH, device=device)
    assert same(runner.run({"x": x}), x * 2)
    assert all(graph.total_ms >= graph.capture_ms > 0 for graph in runner.report().graphs)
