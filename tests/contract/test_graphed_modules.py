"""`graphed` on modules: as good as the module it wraps, to everyone who looks."""

import pytest
import torch

from contract.steps import WIDTH, CallCounter, PythonRuns, mlp, padded, randn, same
from ostinato.graphs import Reason, graphed


class Counting(torch.nn.Module):
    """A module with everything a wrapper could get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.scale = torch.nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.hidden_size = WIDTH
        self.python_runs = PythonRuns()

    def forward(self, x, shift=None):
        self.python_runs.add()
        self.steps.add_(1)
        y = self.inner(x) * self.scale + self.steps
        return y if shift is None else y + shift

    def describe(self) -> str:
        return f"counting {self.hidden_size}"


@pytest.fixture
def wrapped(device):
    torch.manual_seed(0)
    module = Counting().to(device).eval()
    return module, graphed(module, ladder=[2, 4])


def test_attributes_and_methods_are_those_of_the_module(wrapped):
    module, f = wrapped
    assert f.hidden_size == WIDTH
    assert f.describe() == f"counting {WIDTH}"
    assert f.inner is module.inner
    assert f.scale is module.scale
    assert f.steps is module.steps
    assert f.training is False
    assert f.unwrap() is module
    assert isinstance(f, torch.nn.Module)
    with pytest.raises(AttributeError, match="nope"):
        f.nope  # noqa: B018


def test_containers_stay_containers(device):
    model = mlp(device)
    f = graphed(model, ladder=[2])
    assert f[0] is model[0]
    assert len(f) == len(model)
    assert list(f) == list(model)


def test_attributes_are_set_and_deleted_on_the_module(wrapped):
    module, f = wrapped
    f.hidden_size = 99
    assert module.hidden_size == 99
    f.fresh = "fresh"
    assert module.fresh == "fresh"
    del f.fresh
    assert not hasattr(module, "fresh")
    assert not hasattr(f, "fresh")
    f.extra = torch.nn.Linear(1, 1)
    assert module.extra is f.extra
    assert "extra.weight" in f.state_dict()
    del f.extra
    assert "extra.weight" not in module.state_dict()
    new = torch.nn.Parameter(torch.zeros(WIDTH))
    f.scale = new
    assert module.scale is new
    assert dict(f.named_parameters())["scale"] is new
    f.register_buffer("late", torch.zeros(1))
    assert "late" in module.state_dict()


def test_the_state_dict_is_the_modules_and_loads_both_ways(wrapped, device):
    module, f = wrapped
    assert list(f.state_dict()) == list(module.state_dict())
    assert [name for name, _ in f.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert [name for name, _ in f.named_buffers()] == [name for name, _ in module.named_buffers()]
    assert [name for name, _ in f.named_modules()][1:] == [name for name, _ in module.named_modules()][1:]
    assert len(list(f.parameters())) == len(list(module.parameters()))
    other = Counting().to(device)
    assert not f.load_state_dict(other.state_dict()).missing_keys
    assert same(module.state_dict(), other.state_dict())
    another = Counting().to(device)
    another.load_state_dict(f.state_dict())
    assert same(another.state_dict(), module.state_dict())


def test_a_strict_load_complains_as_the_module_does(wrapped):
    _, f = wrapped
    with pytest.raises(RuntimeError, match="inner"):
        f.load_state_dict({})


def test_a_buffer_that_counts_advances_exactly_once_per_call(wrapped, device):
    module, f = wrapped
    for call, n in enumerate((3, 1, 4, 7, 2), start=1):
        f(randn(n, WIDTH, device=device))
        assert module.steps.item() == call


def test_python_stands_still_and_results_equal_the_modules(wrapped, device):
    module, f = wrapped
    f(randn(3, WIDTH, device=device))
    calls = module.python_runs.calls
    for n in (1, 2, 3, 4):
        x = randn(n, WIDTH, device=device, seed=n)
        out = f(x).clone()
        module.steps.sub_(1)
        with torch.no_grad():
            assert same(out, module(padded(x, 2 if n < 3 else 4))[:n])
        calls += 1
    assert module.python_runs.calls == calls


def test_train_and_eval_reach_the_module_and_a_change_runs_eagerly_with_the_reason(wrapped, device, caplog):
    module, f = wrapped
    x = randn(3, WIDTH, device=device)
    f(x)
    f.train()
    assert module.training
    assert module.inner.training
    f(x)
    assert f.report().eager_steps == {str(Reason.TRAINING_MODE_CHANGED): 1}
    assert "calls run eagerly: training-mode-changed since the capture" in caplog.text
    f.eval()
    assert not module.training
    f(x)
    assert (f.report().replays, sum(f.report().eager_steps.values())) == (2, 1)


def test_a_submodule_switched_to_training_runs_eagerly_too(device):
    model = torch.nn.Sequential(mlp(device), torch.nn.Dropout(0.5)).eval()
    f = graphed(model, ladder=[4])
    x = randn(4, WIDTH, device=device)
    f(x)
    model[1].train()
    torch.manual_seed(0)
    out = f(x).clone()
    torch.manual_seed(0)
    with torch.no_grad():
        assert same(out, model(x)), "dropout is on now and the graph knows nothing of it"


def test_it_takes_its_place_inside_another_module(device):
    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = graphed(mlp(device), ladder=[2, 4])
            self.head = torch.nn.Linear(WIDTH, 2, device=device)

        def forward(self, x):
            return self.head(self.body(x))

    outer = Outer().eval()
    plain = torch.nn.ModuleDict({"body": mlp(device), "head": torch.nn.Linear(WIDTH, 2, device=device)})
    assert list(outer.state_dict()) == list(plain.state_dict())
    outer.load_state_dict(plain.state_dict())
    x = randn(3, WIDTH, device=device)
    with torch.no_grad():
        for _ in range(2):
            assert same(outer(x), plain["head"](plain["body"](padded(x, 4))[:3]))
    assert outer.body.report().replays == 2
    outer.train()
    assert outer.body.training
    plain.load_state_dict(outer.state_dict())
    assert sum(1 for _ in outer.parameters()) == 6
    assert "body" in repr(outer)


def test_keyword_tensors_of_a_module(wrapped, device):
    module, f = wrapped
    x, shift = randn(3, WIDTH, device=device), randn(3, WIDTH, device=device, seed=1)
    out = f(x, shift=shift).clone()
    module.steps.zero_()
    with torch.no_grad():
        assert same(out, module(padded(x, 4), padded(shift, 4))[:3])


def test_forward_hooks_of_the_module_are_part_of_the_graph(device):
    model = mlp(device)
    model.register_forward_hook(lambda module, args, out: out * 2)
    f = graphed(model, ladder=[4])
    x = randn(4, WIDTH, device=device)
    with torch.no_grad():
        wanted = model(x)
    assert same(f(x), wanted)
    assert same(f(x), wanted)


def test_forward_is_the_plain_module_without_graphs(wrapped, device):
    _, f = wrapped
    f(randn(2, WIDTH, device=device))
    replays = f.report().replays
    f.forward(randn(2, WIDTH, device=device))
    assert f.report().replays == replays


def test_recapture_serves_from_the_new_memory_after_a_move(device):
    f = graphed(mlp(device), ladder=[2, 4])
    x = randn(3, WIDTH, device=device)
    f(x)
    f.double().float()
    with torch.no_grad():
        for parameter in f.parameters():
            parameter.mul_(1.5)
    f.recapture()
    with torch.no_grad():
        assert same(f(x), f.unwrap()(padded(x, 4))[:3])
    assert [row.num_tokens for row in f.report().graphs] == [4, 2]


def test_gradients_flow_in_training_once_the_wrapper_is_taken_off(device):
    f = graphed(mlp(device), ladder=[4])
    f(randn(4, WIDTH, device=device))
    f.unwrap()(randn(4, WIDTH, device=device)).sum().backward()
    assert all(parameter.grad is not None for parameter in f.parameters())
    f.zero_grad()
    assert all(parameter.grad is None for parameter in f.parameters())


def test_a_module_without_parameters_can_be_wrapped(device):
    calls = CallCounter(torch.tanh)

    class Plain(torch.nn.Module):
        def forward(self, x):
            return calls(x)

    f = graphed(Plain(), ladder=[4])
    x = randn(3, WIDTH, device=device)
    f(x)
    calls.calls = 0
    assert same(f(x), x.tanh())
    assert calls.calls == 0


def test_a_wrapper_of_a_wrapped_module_acts_once(device):
    model = mlp(device)
    inner = graphed(model, ladder=[4], mode="piecewise")
    outer = graphed(inner, ladder=[4])
    x = randn(4, WIDTH, device=device)
    with torch.no_grad():
        wanted = model(x)
    for _ in range(2):
        assert same(outer(x), wanted)
    assert outer.unwrap() is inner
    assert outer.report().replays == 2
    assert list(outer.state_dict()) == list(model.state_dict())
