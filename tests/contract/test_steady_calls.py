"""A steady call costs the CPU a fixed amount of Python, however deep the model is."""

import sys

import pytest
import torch

from ostinato.graphs import CaptureOptions, ConfigError, graphed

OF_THE_RUNTIME = "/ostinato/graphs/"
MOST_FRAMES = 40
"""Calls of the runtime's own functions in a call with one argument and one result."""
MOST_IN_C = 40
"""And of built-in functions by these."""


def encoder(layers, device):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return model.to(device).eval()


def counted(call):
    """How many functions of the runtime a call enters, and how many built-in ones these call."""
    frames, built_in = 0, 0

    def note(frame, event, argument):
        nonlocal frames, built_in
        file = frame.f_code.co_filename
        if OF_THE_RUNTIME in file:
            frames += event == "call"
            built_in += event == "c_call"

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return frames, built_in


@pytest.mark.parametrize("grad", [False, True])
def test_a_steady_call_enters_few_functions_and_no_more_for_a_deep_model(device, grad):
    seen = []
    for layers in (2, 12):
        f = graphed(encoder(layers, device), ladder=[1, 2], options=CaptureOptions(freeze_gc=False))
        x = torch.randn(2, 3, 16, device=device)
        with torch.set_grad_enabled(grad):
            for _ in range(3):
                f(x)
            for graph in f.graph_call.graphs():
                graph.replay = lambda: None  # a tape is made of Python
            seen.append(counted(lambda f=f, x=x: f(x)))
        assert f.report().eager_steps == {}
    assert seen[0] == seen[1]
    frames, built_in = seen[1]
    assert frames <= MOST_FRAMES
    assert built_in <= MOST_IN_C


def test_results_that_would_have_gradients_are_refused_in_every_call_and_are_the_callers_own(device):
    """Also where a call without gradients, another size or frozen weights come between."""
    model = torch.nn.Linear(4, 4).to(device)
    f = graphed(lambda x: (model(x), x + 1), ladder=[2, 4])
    kept = []
    for rows in (4, 3, 4, 2, 4):
        x = torch.randn(rows, 4, device=device)
        y, z = f(x)
        assert (y.requires_grad, z.requires_grad) == (True, False)
        with torch.no_grad():
            expected = model(x)
            assert not f(x)[0].requires_grad
        for _ in range(2):
            with pytest.raises(ConfigError, match="inference"):
                y.sum().backward()
        assert model.weight.grad is None
        kept.append((y, expected))
        model.requires_grad_(False)
        assert not f(x)[0].requires_grad
        model.requires_grad_(True)
    for y, expected in kept:
        torch.testing.assert_close(y.detach(), expected)
    y.add_(1)  # no view of anything
    with pytest.raises(ConfigError):
        torch.autograd.grad(y.sum(), model.weight)


def test_an_argument_that_requires_gradients_has_its_own_history(device):
    model = torch.nn.Linear(4, 4).to(device)
    f = graphed(lambda x: model(x), ladder=[2])
    plain = torch.randn(2, 4, device=device)
    assert f(plain).requires_grad
    for _ in range(2):
        x = torch.randn(2, 4, device=device, requires_grad=True)
        with pytest.raises(ConfigError):
            torch.autograd.grad(f(x).sum(), x)
    with pytest.raises(RuntimeError):  # of another call's argument it is no function
        torch.autograd.grad(f(plain).sum(), x)


def test_a_plan_ends_with_its_graph(device):
    """A size that is dropped runs from the next one, and then eagerly."""
    f = graphed(lambda x: x * 2, ladder=[2, 4])
    x = torch.randn(2, 3, device=device)
    for _ in range(3):
        assert torch.equal(f(x), x * 2)
    [entry] = f.graph_call._entries
    for left in ("padded", None):
        smallest = min(entry.runner.graphs, key=lambda key: key.descriptor.num_tokens)
        entry.runner.drop(smallest)
        assert torch.equal(f(x), x * 2)
        assert bool(f.report().eager_steps) == (left is None)
