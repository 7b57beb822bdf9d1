"""What has gradients without graphs raises when it is differentiated; what has none is an ordinary tensor."""

import logging

import pytest
import torch
from torch import nn

from contract.steps import WIDTH, close, mlp, randn, reasons, same, wrap
from ostinato.graphs import ConfigError

REFUSED = {"match": "carry no gradients"}


def head(device):
    return nn.Linear(WIDTH, 1).to(device)


def wrappers(device):
    """Every way to write a backbone whose parameters require gradients."""
    model = mlp(device)

    class Holder:
        def __init__(self):
            self.body = model

        def embed(self, x):
            return self.body(x)

    weight = randn(WIDTH, WIDTH, device=device).requires_grad_()
    return {
        "module": model,
        "function": lambda x: model(x),
        "bound method": Holder().embed,
        "closure over a tensor": lambda x: x @ weight,
    }


KINDS = ["module", "function", "bound method", "closure over a tensor"]


@pytest.mark.parametrize("results", ["copied", "guarded"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_backbone_behind_a_head_raises_instead_of_not_training(device, kind, results):
    f, top = wrap(wrappers(device)[kind], results=results), head(device)
    for n in (3, 4, 7):
        loss = top(f(randn(n, WIDTH, device=device))).sum()
        with pytest.raises(ConfigError, **REFUSED):
            loss.backward()
    assert reasons(f) == {"larger-than-max": 1}


def test_a_frozen_backbone_behind_a_head_trains_the_head(device):
    model = mlp(device).requires_grad_(False)
    f, top = wrap(lambda x: model(x)), head(device)
    x = randn(3, WIDTH, device=device)
    for _ in range(2):
        h = f(x)
        assert not h.requires_grad
        top.zero_grad()
        top(h).sum().backward()
        assert torch.allclose(top.weight.grad[0], model(x).sum(0), atol=1e-5)
    model[0].weight.requires_grad_()
    with pytest.raises(ConfigError, **REFUSED):
        top(f(x)).sum().backward()
    model[0].weight.requires_grad_(False)
    top(f(x)).sum().backward()


@pytest.mark.parametrize("n", [3, 7])
@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "detach"])
def test_a_function_that_has_no_gradients_by_itself_is_no_false_alarm(device, how, n):
    model = mlp(device)
    step = {
        "no_grad": torch.no_grad()(lambda x: model(x)),
        "inference_mode": torch.inference_mode()(lambda x: model(x) * 1),
        "detach": lambda x: model(x).detach(),
    }[how]
    f, top = wrap(step), head(device)
    for _ in range(2):
        h = f(randn(n, WIDTH, device=device))
        assert not h.requires_grad
        h.cpu().numpy()
    if how != "inference_mode" or n == 3:
        top(h).sum().backward()


def test_only_those_results_that_have_gradients_are_refused(device):
    model = mlp(device)
    f = wrap(
        lambda x: {"y": model(x), "input": x * 2, "detached": model(x).detach(), "best": model(x).argmax(1)}
    )
    out = f(randn(3, WIDTH, device=device))
    assert {name: leaf.requires_grad for name, leaf in out.items()} == {
        "y": True,
        "input": False,
        "detached": False,
        "best": False,
    }


def test_what_is_left_in_an_attribute_is_refused_as_well(device):
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            self.hidden = self.layer(x)
            return self.hidden.detach() + 1

    module = Kept().to(device)
    f = wrap(module)
    for _ in range(2):
        assert not f(randn(3, WIDTH, device=device)).requires_grad
        with pytest.raises(ConfigError, **REFUSED):
            module.hidden.sum().backward()


def test_arguments_that_require_gradients(device):
    f = wrap(lambda x, y: (x * 2, y + 1))
    x, y = randn(3, WIDTH, device=device), randn(3, WIDTH, device=device, seed=1)
    f(x, y)
    left, right = f(x.requires_grad_(), y)
    assert not right.requires_grad
    with pytest.raises(ConfigError, **REFUSED):
        left.sum().backward()
    left, right = f(x.requires_grad_(False), y.requires_grad_())
    assert not left.requires_grad
    with pytest.raises(ConfigError, **REFUSED):
        torch.autograd.grad(right.sum(), y)


def test_nothing_is_run_for_gradients_where_none_are_enabled(device, caplog):
    model, logger = mlp(device), logging.getLogger("test.runs")
    caplog.set_level(logging.INFO, "test.runs")

    def step(x):
        logger.info("runs")  # which no replay repeats
        return model(x)

    f = wrap(step)
    x = randn(3, WIDTH, device=device)
    with torch.no_grad():
        wanted = f(x)
        before = caplog.text.count("runs")
        assert close(f(x), wanted)
    assert before > 0
    assert caplog.text.count("runs") == before


def test_looking_for_gradients_leaves_no_trace(device):
    count = torch.zeros((), device=device)
    model = mlp(device)

    def step(x):
        count.add_(1)
        return model(x) + torch.rand(1, device=device) * 0

    f = wrap(step)
    x = randn(3, WIDTH, device=device)
    with torch.no_grad():
        f(x)
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    f(x)
    f(x)
    assert count.item() == 3
    if device.type == "cuda":
        assert same(torch.rand(3), wanted)
