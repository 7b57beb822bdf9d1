"""Parts of a model from graphs, with their backward, beside the same parts run eagerly."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from contract.steps import randn
from ostinato.graphs import AddressError, CaptureError, ConfigError, make_graphed_callables

WIDTH = 6


def parts(device, *, dropout=0.0, count=2):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = [
            nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, WIDTH))
            for _ in range(count)
        ]
    return [part.to(device) for part in made]


def graphed(modules, device, rows=8, **settings):
    samples = tuple((randn(rows, WIDTH, device=device).requires_grad_(),) for _ in modules)
    return make_graphed_callables(tuple(modules), samples, **settings)


def train(modules, batches, device, *, lr=0.05):
    """Two parts with something between them that no graph could do."""
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=lr, momentum=0.9)
    losses, gradients = [], []
    for x in batches:
        x = x.clone().requires_grad_()
        h = modules[0](x)
        if float(h.detach().sum()) > 1e9:
            raise AssertionError
        loss = (modules[1](h.relu() + x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        gradients.append(x.grad.clone())
    return losses, gradients


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_training_through_graphed_parts_equals_eager(device, dropout):
    eager = parts(device, dropout=dropout)
    ours = graphed(copy.deepcopy(eager), device)
    batches = [randn(8, WIDTH, device=device, seed=i) for i in range(8)]
    torch.manual_seed(4)
    expected = train(eager, batches, device)
    torch.manual_seed(4)
    got = train(ours, batches, device)
    tolerance = 0 if device.type == "cpu" else 1e-5
    assert got[0] == pytest.approx(expected[0], rel=tolerance)
    for one, other in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert [part.forward.replays for part in ours] == [8, 8]


def test_batches_are_padded_to_rungs(device):
    eager = parts(device)
    ours = graphed(copy.deepcopy(eager), device, ladder=[2, 4, 8])
    batches = [randn(rows, WIDTH, device=device, seed=rows) for rows in (8, 3, 1, 5, 11, 2)]
    expected, got = train(eager, batches, device), train(ours, batches, device)
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    for one, other in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert ours[0].forward.replays == 5
    assert ours[0].forward.eager_steps == {"larger-than-max": 1}


class Odd(nn.Module):
    """Rows that depend on each other, or results that padding cannot be cut from."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind
        self.norm, self.gru = nn.BatchNorm1d(WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        h = self.linear(x)
        return {
            "batch norm": lambda: self.norm(h),
            "mean": lambda: h.square().mean(),
            "count of rows": lambda: h / len(h),
            "small numbers": lambda: h * 1e-5 / len(h),
            "number of rows": lambda: (h, x.size(0)),
            "rows behind": lambda: self.gru(h.unsqueeze(1))[1],
            "weight": lambda: (h, self.linear.weight.square()),
        }[self.kind]()


@pytest.mark.parametrize(
    "kind",
    ["batch norm", "mean", "count of rows", "small numbers", "number of rows", "rows behind", "weight"],
)
def test_without_a_ladder_fewer_rows_are_padded_only_where_they_may_be(device, kind, caplog):
    torch.manual_seed(0)
    eager = Odd(kind).to(device)
    sample = randn(WIDTH, WIDTH, device=device).requires_grad_()
    ours = make_graphed_callables(copy.deepcopy(eager), (sample,), allow_unused_input=True)
    for rows in (WIDTH, 4):
        found = []
        for part in (eager, ours):
            part.zero_grad()
            result = part(randn(rows, WIDTH, device=device).requires_grad_())
            tensors = [r for r in (result if isinstance(result, tuple) else (result,)) if r is not rows]
            sum(tensor.square().sum() for tensor in tensors).backward()
            found.append(
                [*tensors, *(p.grad for p in part.parameters() if p.grad is not None and p.grad.any())]
            )
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)
    is_padded = kind in ("rows behind", "weight")
    assert ours.forward.eager_steps == ({} if is_padded else {"padding-disabled": 1})
    assert caplog.text.count("fewer rows than 6") == (0 if is_padded else 1)


def test_random_numbers_hide_no_count_of_rows(device):
    sample = randn(WIDTH, WIDTH, device=device).requires_grad_()
    for divides in (False, True):

        def part(x, divides=divides):
            # Backwards: which row gets which number depends on how many there are, as it does on a GPU.
            is_left = torch.rand_like(x.detach()).flip(0) >= 0.5
            return 2 * x * is_left / (len(x) if divides else 3)

        ours = make_graphed_callables(part, (sample,))
        x = sample.detach()[:4].clone().requires_grad_()
        out = ours(x)
        assert bool(((out == 0) | torch.isclose(out, 2 * x / (4 if divides else 3))).all())
        assert ours.eager_steps == ({"padding-disabled": 1} if divides else {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_of_16_bits_is_no_count_of_rows(device, dtype):
    """As by a library that multiplies few rows in another order than many."""

    def part(x):
        low = x.to(dtype)
        return (low * (1 + 2**-7) if len(x) > 3 else low).float()

    sample = randn(WIDTH, WIDTH, device=device).requires_grad_()
    ours = make_graphed_callables(part, (sample,))
    ours(sample.detach()[:4].clone().requires_grad_())
    assert ours.eager_steps == ({} if dtype is torch.bfloat16 else {"padding-disabled": 1})


class Carries(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.is_odd, self.last, self.kind = nn.Linear(WIDTH, WIDTH), False, 0, kind
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        if self.kind == "flag":
            self.is_odd = not self.is_odd
            return self.linear(x) * (2 if self.is_odd else 1)
        if self.kind == "result":
            h = self.linear(x) + self.last
            self.last = h.detach()
            return h
        if self.kind == "memory":
            self.linear.weight.data = nn.functional.normalize(self.linear.weight.data)
            return self.linear(x)
        self.mean = self.mean * 0.5 + x.detach().mean(0)
        return self.linear(x) + self.mean


@pytest.mark.parametrize("kind", ["flag", "result", "memory", "buffer"])
def test_a_part_in_which_python_carries_something_on_is_refused_and_as_it_was(device, kind):
    part = Carries(kind).to(device)
    before = copy.deepcopy(part.state_dict())
    with pytest.raises(
        CaptureError, match=r"part 0: .*(is decided in Python: is_odd|assigning a new tensor)"
    ):
        graphed([part], device)
    assert (part.is_odd, part.last) == (False, 0)
    assert all(torch.equal(value, before[name]) for name, value in part.state_dict().items())


class Checkpointed(nn.Module):
    def __init__(self, part, reentrant):
        super().__init__()
        self.part, self.reentrant = part, reentrant

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_region_of_a_part_keeps_what_it_draws(device, reentrant):
    eager = [Checkpointed(part, reentrant) for part in parts(device, dropout=0.4)]
    ours = graphed(copy.deepcopy(eager), device)
    batches = [randn(8, WIDTH, device=device, seed=i) for i in range(4)]
    results = []
    for modules in (eager, ours):
        torch.manual_seed(4)
        results.append(train(modules, batches, device)[0])
    assert results[1] == pytest.approx(results[0], rel=0 if device.type == "cpu" else 1e-5)
    assert [part.forward.replays for part in ours] == [4, 4]


def test_gradients_accumulate_and_results_may_be_kept(device):
    (eager,) = parts(device, count=1)
    ours = copy.deepcopy(eager)
    make_graphed_callables(ours, (randn(4, WIDTH, device=device),))
    for seed in range(3):
        x = randn(4, WIDTH, device=device, seed=seed)
        for module in (eager, ours):
            module(x).sum().backward()
    for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_gradient_that_autograd_holds_is_not_overwritten_by_the_next_backward(device):
    eager = parts(device)
    first, second = graphed(copy.deepcopy(eager), device)
    gradients = []
    for one, other in (eager, (first, second)):
        x = randn(8, WIDTH, device=device, seed=2).requires_grad_()
        a = one(x)
        (a.sin() + other(x)).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_what_no_graph_serves_runs_eagerly_with_its_gradients(device):
    (part,) = parts(device, count=1)
    make_graphed_callables(part, (randn(4, WIDTH, device=device),))
    x = randn(4, WIDTH, device=device).requires_grad_()
    part(x).sum().backward()
    assert x.grad is not None
    part.eval()
    part(x.detach())
    part.train()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        part(x.detach())
    part(x.detach())
    counts = {"unseen-signature": 1, "training-mode-changed": 1, "autocast-changed": 1}
    assert part.forward.eager_steps == counts
    assert part.forward.replays == 1


def test_functions_and_several_results(device):
    def function(x, *, scale):
        return {"twice": x * scale, "sign": x.sign().to(torch.int64)}

    x = randn(4, WIDTH, device=device).requires_grad_()
    served = make_graphed_callables(function, (x.detach().requires_grad_(),), sample_kwargs={"scale": 2.0})
    result = served(x, scale=2.0)
    assert torch.equal(result["twice"], x * 2)
    assert torch.equal(result["sign"], x.sign().to(torch.int64))
    assert not result["sign"].requires_grad
    result["twice"].sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_a_parameter_that_is_not_used(device):
    (part,) = parts(device, count=1)
    part.unused = nn.Parameter(torch.zeros(3, device=device))
    part.forward = lambda x: part[0](x) * 2
    with pytest.raises(RuntimeError, match="allow_unused"):
        make_graphed_callables(part, (randn(4, WIDTH, device=device),))
    make_graphed_callables(part, (randn(4, WIDTH, device=device),), allow_unused_input=True)
    part(randn(4, WIDTH, device=device)).sum().backward()
    assert part.unused.grad is None
    assert part[0].weight.grad is not None


def test_hooks_of_gradients_are_called_once(device):
    """Those of parameters by autograd, behind the graph, those of the part around it, others in it."""
    (ours, _), (eager, _) = (parts(device) for _ in range(2))
    ours.load_state_dict(eager.state_dict())
    seen, counts = [], [torch.zeros((), device=device) for _ in range(2)]
    for module, count in zip((ours, eager), counts, strict=True):
        weight = next(module.parameters())
        weight.register_hook(lambda gradient: gradient * 0.5)
        weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(1))
        module[1].register_full_backward_hook(lambda *given, count=count: (count.add_(1), None)[1])
        module.register_full_backward_hook(lambda *given: seen.append(2))
    x = randn(8, WIDTH, device=device).requires_grad_()
    part = make_graphed_callables(ours, (x,))
    for _ in range(3):
        part(x).sum().backward()
        eager(x).sum().backward()
    for one, other in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert [count.item() for count in counts] == [3, 3]
    assert sorted(seen) == [1] * 6 + [2] * 6
    assert part.forward.eager_steps == {}


def test_what_a_part_leaves_in_python_is_left_by_replays(device):
    """In the forward and in the backward; a tensor that it leaves carries gradients, too."""

    class Leaving(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls, self.balance, self.means = nn.Linear(WIDTH, WIDTH), 0, None, []

        def forward(self, x):
            y = self.linear(x)
            self.calls += 1
            self.balance = y.square().mean(-1)
            self.means.append(y.detach().mean(-1))
            return y

    torch.manual_seed(0)
    made = nn.Sequential(Leaving(), nn.ReLU()).to(device)
    eager, found, wanted = copy.deepcopy(made), [], []
    made[1].register_full_backward_hook(lambda *given: found.append(given[2][0].mean(-1)))
    eager[1].register_full_backward_hook(lambda *given: wanted.append(given[2][0].mean(-1)))
    make_graphed_callables(made, (randn(8, WIDTH, device=device),))
    for seed in range(3):
        x = randn(8, WIDTH, device=device, seed=seed)
        for model in (made, eager):
            (model(x).sum() + model[0].balance.sum()).backward()
    assert made.forward.replays == 3
    assert made[0].calls == 3
    torch.testing.assert_close(made[0].means, eager[0].means)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(made.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_refusals(device):
    mean = nn.BatchNorm1d(WIDTH).to(device)
    with pytest.raises(CaptureError, match="depend on each other"):
        graphed([mean], device, ladder=[4, 8])
    (part,) = parts(device, count=1)
    make_graphed_callables(part, (randn(4, WIDTH, device=device),))
    part[0].weight.data = part[0].weight.data.clone()
    with pytest.raises(AddressError, match=r"0\.weight"):
        part(randn(4, WIDTH, device=device))
    with pytest.raises(ConfigError, match="GraphPool"):
        make_graphed_callables(part, (randn(4, WIDTH, device=device),), pool=(0, 1))
    with pytest.raises(ConfigError, match="must match the"):
        make_graphed_callables((part, part), ((randn(4, WIDTH, device=device),),))


def test_capturing_leaves_no_trace(device):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)).to(device)
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    make_graphed_callables(module, (randn(4, WIDTH, device=device),))
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in module.parameters())
