"""Whoever follows a call, differentiates it or brings tensors of an own kind gets what the function gives."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from contract.steps import WIDTH, randn, reasons, same, wrap
from ostinato.graphs import BatchError, ConfigError

LADDER = [1, 2, 4]


def captured(device, **settings):
    """A wrapper with graphs, and the module inside."""
    module = nn.Linear(WIDTH, WIDTH).to(device).eval()
    f = wrap(module, LADDER, **settings)
    with torch.no_grad():
        f(randn(3, WIDTH, device=device))
    return f, module


def _tangent(f, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x))).tangent


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).pow(2).sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "forward mode": _tangent,
    "hessian": lambda f, x: torch.func.hessian(lambda y: f(y).sin().sum())(x),
    "vmap": lambda f, x: torch.vmap(f)(torch.stack([x, 2 * x])),
    "jacobian": lambda f, x: torch.autograd.functional.jacobian(f, x),
    "hessian of autograd": lambda f, x: torch.autograd.functional.hessian(lambda y: f(y).sin().sum(), x),
    "jvp of autograd": lambda f, x: torch.autograd.functional.jvp(f, x, x)[1],
    "trace": lambda f, x: torch.jit.trace(f, (x,), check_trace=False)(2 * x),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("mode", ["full", "none"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_sees_the_function(device, name, mode):
    f, module = captured(device, mode=mode)
    x = randn(3, WIDTH, device=device)
    before = reasons(f).copy()
    assert torch.allclose(TRANSFORMS[name](f, x), TRANSFORMS[name](module, x), atol=1e-5)
    reason = "inside-transform" if mode == "full" else "disabled"
    assert reasons(f)[reason] > before.get(reason, 0)


INSIDE = {
    "jvp": lambda m: lambda x: torch.func.jvp(m, (x,), (torch.ones_like(x),))[1],
    "vjp": lambda m: lambda x: torch.func.vjp(m, x)[1](torch.ones_like(x))[0],
    "jacfwd": lambda m: torch.vmap(torch.func.jacfwd(m)),
    "hessian": lambda m: torch.vmap(torch.func.hessian(lambda row: m(row).square().sum())),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_transform_inside_the_function_is_part_of_its_graph(device, name):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device).eval()
    function = INSIDE[name](model)
    f = wrap(function, LADDER)
    for seed in range(2):
        x = randn(3, WIDTH, device=device, seed=seed)
        torch.testing.assert_close(f(x), function(x), rtol=1e-4, atol=1e-5)
    assert (reasons(f), f.report().replays) == ({}, 2)


def test_a_dispatch_mode_sees_the_ops(device):
    f, _ = captured(device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        f(randn(3, WIDTH, device=device))
    assert counter.get_total_flops() == 2 * 3 * WIDTH * WIDTH
    assert reasons(f) == {"inside-transform": 1}


def test_a_gradient_by_an_argument_is_refused_and_not_left_out(device):
    f, _ = captured(device)
    x = randn(3, WIDTH, device=device).requires_grad_()
    with pytest.raises(ConfigError, match="carry no gradients"):
        (x + f(x)).sum().backward()  # without an error x.grad would be 1 everywhere
    assert f.report().replays == 2


@pytest.mark.parametrize("is_captured", [True, False])
def test_a_functional_call_uses_the_tensors_that_it_is_given(device, is_captured):
    f, module = captured(device) if is_captured else (wrap(nn.Linear(WIDTH, WIDTH).to(device), LADDER), None)
    module, x = module or f.unwrap(), randn(3, WIDTH, device=device)
    other = {name: (2 * p).detach().requires_grad_() for name, p in module.named_parameters()}
    result = torch.func.functional_call(f, other, (x,))
    assert same(result, torch.func.functional_call(module, other, (x,)))
    result.sum().backward()
    assert all(tensor.grad is not None for tensor in other.values())
    assert reasons(f) == {"inside-transform": 1}
    with torch.no_grad():
        assert torch.allclose(f(x), module(x), atol=1e-5)
    assert reasons(f) == {"inside-transform": 1}


def test_a_result_that_could_have_had_gradients_may_be_changed_in_place(device):
    f, module = captured(device)
    x = randn(3, WIDTH, device=device).requires_grad_()
    got, wanted = f(x), module(x)
    got[:, 0] = wanted[:, 0] = -1
    assert torch.allclose(got, wanted, atol=1e-5)


class Marked(torch.Tensor):
    """A subclass without anything of its own."""


STRANGE = {
    "sparse": (lambda x: x.to_sparse(), lambda x: x.to_dense() * 2),
    "nested": (lambda x: torch.nested.nested_tensor([x, x[:1]]), lambda x: x.to_padded_tensor(0.0)),
    "quantised": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), lambda x: x.dequantize()),
    "of a class": (lambda x: x.as_subclass(Marked), lambda x: x + isinstance(x, Marked)),
}


@pytest.mark.filterwarnings("ignore:.*(nested tensors is in prototype|quantized tensor creation)")
@pytest.mark.parametrize("name", STRANGE)
def test_strange_tensors_run_eagerly_for_a_reason(device, name):
    make, function = STRANGE[name]
    f, x = wrap(function, LADDER), randn(3, WIDTH, device=device)
    for _ in range(2):
        assert same(f(make(x)), function(make(x)))
    assert reasons(f) == {"opaque-argument": 2}
    with pytest.raises(BatchError, match="ordinary tensors only"):
        f.capture(make(x))


def test_a_subclass_is_not_served_from_graphs_of_plain_tensors(device):
    function = STRANGE["of a class"][1]
    f, x = wrap(function, LADDER), randn(3, WIDTH, device=device)
    assert same(f(x), x)
    assert same(f(x.as_subclass(Marked)), (x + 1).as_subclass(Marked))
    assert reasons(f) == {"opaque-argument": 1}
    assert f.report().replays == 1


def test_a_guarded_result_may_be_fed_back(device):
    """Nothing asks the argument anything once the call has overwritten it."""
    f, module = captured(device, debug=True)
    x = randn(3, WIDTH, device=device)
    assert torch.allclose(f(f(x)), module(module(x)), atol=1e-5)


class _Counting(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def test_a_function_mode_sees_the_function(device):
    f, module = captured(device)
    x = randn(3, WIDTH, device=device)
    with torch.no_grad(), _Counting() as counting:
        assert torch.allclose(f(x), module(x), atol=1e-5)
    assert counting.calls.count("linear") == 2
    assert reasons(f) == {"inside-transform": 1}


def test_a_default_device_costs_no_graphs(device):
    f, module = captured(device)
    x = randn(3, WIDTH, device=device)
    with torch.no_grad():
        wanted = module(x)
        with torch.device(device):
            assert torch.allclose(f(x), wanted, atol=1e-5)
        try:
            torch.set_default_device(device)
            assert torch.allclose(f(x), wanted, atol=1e-5)
            with _Counting() as counting:
                f(x)
        finally:
            torch.set_default_device(None)
    assert "linear" in counting.calls
    assert reasons(f) == {"inside-transform": 1}
