"""A step may ask what it is captured for: the one thing besides tensors that shapes its work."""

import torch

from contract.steps import WIDTH, make_runner, randn, same
from ostinato.graphs import BatchDescriptor, BatchShape


def test_a_step_with_a_descriptor_parameter_is_told_what_it_is_captured_for(device):
    seen = []

    def step(x, descriptor):
        seen.append(descriptor)
        return x * descriptor.num_reqs

    runner = make_runner(device, step, [2, 4])
    assert set(seen) == {BatchDescriptor.decode(2), BatchDescriptor.decode(4)}
    x = randn(3, WIDTH, device=device)
    assert same(runner.run({"x": x}), x * 4), "the graph's descriptor, not the batch's"
    assert runner.verify().passed


def test_eagerly_it_is_told_the_shape_it_runs(device):
    seen = []

    def step(x, descriptor):
        seen.append(descriptor)
        return x

    runner = make_runner(device, step, [2])
    runner.run({"x": randn(5, WIDTH, device=device)}, BatchShape.decode(5, context=77))
    assert seen[-1] == BatchDescriptor.decode(5, context=77)


def test_a_field_of_that_name_stays_a_field(device):
    from contract.steps import x_field
    from ostinato.graphs import Field

    fields = [x_field(), Field("descriptor", torch.float32)]
    runner = make_runner(device, lambda x, descriptor: x + descriptor[:, None], [2], fields=fields)
    x, shift = randn(2, WIDTH, device=device), randn(2, device=device)
    assert same(runner.run({"x": x, "descriptor": shift}), x + shift[:, None])
