"""The contract of `contract/test_garbage_collection.py`, on CUDA, and what dies while a stream captures."""

import torch

from contract.steps import WIDTH, key, make_runner, x_field
from contract.test_garbage_collection import *  # noqa: F403
from ostinato.graphs import BatchShape, InputBuffers
from ostinato.graphs.backends import backend_for
from ostinato.graphs.capturing.gate import is_recording


def test_pinned_inputs_may_die_while_a_graph_is_recorded(device):
    """Copies on the stream that captures have read them: torch marks that stream when it frees them."""
    buffers = InputBuffers([x_field()], max_tokens=4, device=device)
    with backend_for(device).stream():
        buffers.fill({"x": torch.ones(4, WIDTH)}, BatchShape(4, 4, 1), key(4).descriptor)
    torch.cuda.synchronize()
    dying = [buffers]
    del buffers

    def step(x):
        if is_recording():
            dying.clear()
        return x * 2

    runner = make_runner(device, step, [4])
    assert not dying
    for number in range(4):
        batch = {"x": torch.full((4, WIDTH), float(number))}
        assert float(runner.run(batch).sum()) == 2 * number * 4 * WIDTH
        assert torch.ones(1).pin_memory().is_pinned()
