"""Several calls of parts before their backwards, in any order; what results and gradients are then."""

import copy
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from contract.steps import randn
from ostinato.graphs import (
    BatchError,
    CaptureError,
    ConfigError,
    GraphPool,
    StaleOutputError,
    graphed,
    make_graphed_callables,
    step_mode,
)

WIDTH = 6


class Block(nn.Module):
    """Saves its input, its output, intermediates and a mask."""

    def __init__(self, seed):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.one, self.two = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
            self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        h = self.one(self.norm(x)).relu()
        return x + self.two(h * h.sigmoid()).tanh()


def stages(device, count=2):
    return [Block(seed).to(device) for seed in range(count)]


def served(modules, device, rows=4, **how):
    twins = [copy.deepcopy(module) for module in modules]
    samples = tuple((randn(rows, WIDTH, device=device).requires_grad_(),) for _ in twins)
    return make_graphed_callables(tuple(twins), samples, **how)


def gradients(modules):
    return [p.grad for module in modules for p in module.parameters()]


def assert_close(ours, theirs, device):
    tolerance = 1e-6 if device.type == "cpu" else 1e-4
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def run(modules, inputs, schedule):
    """`schedule`: ("F", stage, microbatch) and ("B", microbatch). Each stage of a microbatch is a call."""
    values, losses = dict(enumerate(inputs)), {}
    for kind, *what in schedule:
        if kind == "F":
            stage, number = what
            values[number] = modules[stage](values[number])
            if stage == len(modules) - 1:
                losses[number] = values.pop(number).square().mean()
        else:
            losses[what[0]].backward()
    return [losses[number].detach() for number in range(len(inputs))]


def compare(modules, ours, inputs, schedule, device):
    for module in (*modules, *ours):
        module.zero_grad()
    twins = [[x.clone().requires_grad_() for x in inputs] for _ in range(2)]
    expected, got = (run(m, xs, schedule) for m, xs in zip((modules, ours), twins, strict=True))
    assert_close(got, expected, device)
    assert_close([x.grad for x in twins[1]], [x.grad for x in twins[0]], device)
    assert_close(gradients(ours), gradients(modules), device)


def one_forward_one_backward(count, depth):
    forwards = [[("F", 0, n), ("F", 1, n)] for n in range(count)]
    schedule = [step for pair in forwards[:depth] for step in pair]
    for n in range(count):
        schedule.append(("B", n))
        schedule += forwards[n + depth] if n + depth < count else []
    return schedule


SCHEDULES = {
    "1F1B": one_forward_one_backward(6, 3),
    "all forwards first": [("F", s, n) for s in range(2) for n in range(3)] + [("B", n) for n in range(3)],
    "last in, first out": [("F", s, n) for n in range(3) for s in range(2)] + [("B", n) for n in (2, 1, 0)],
    "stages in turns": [("F", 0, 0), ("F", 0, 1), ("F", 1, 1), ("F", 1, 0), ("B", 0), ("B", 1)],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_pipelines_equal_eager(device, name):
    modules, schedule = stages(device), SCHEDULES[name]
    ours = served(modules, device, in_flight=3)
    count = 1 + max(step[-1] for step in schedule)
    for _ in range(2):
        inputs = [randn(4, WIDTH, device=device, seed=n) for n in range(count)]
        compare(modules, ours, inputs, schedule, device)
    assert [part.forward.eager_steps for part in ours] == [{}, {}]
    assert [part.forward.replays for part in ours] == [2 * count] * 2


@st.composite
def legal_schedules(draw):
    """Forwards and backwards in a random order, with at most three microbatches in flight, and their rows."""
    count = draw(st.integers(1, 6))
    rows = draw(st.lists(st.integers(1, 5), min_size=count, max_size=count))
    at, done, schedule = [0] * count, 0, []
    while done < count:
        in_flight = [n for n in range(count) if 0 < at[n] < 3]
        possible = [n for n in range(count) if at[n] < 3 and (at[n] or len(in_flight) < 3)]
        number = draw(st.sampled_from(possible))
        schedule.append(("F", at[number], number) if at[number] < 2 else ("B", number))
        at[number] += 1
        done += at[number] == 3
    return rows, schedule


@pytest.fixture
def ladders(device):
    modules = stages(device)
    return modules, served(modules, device, ladder=[2, 4], in_flight=3)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=legal_schedules())
def test_any_order_and_any_numbers_of_rows_equal_eager(device, ladders, case):
    (modules, ours), (rows, schedule) = ladders, case
    inputs = [randn(n, WIDTH, device=device, seed=i) for i, n in enumerate(rows)]
    compare(modules, ours, inputs, schedule, device)
    reasons = {str(reason) for part in ours for reason in part.forward.eager_steps}
    assert reasons <= {"larger-than-max"}


def test_more_calls_in_flight_than_there_is_memory_for_raise_before_anything_happens(device):
    modules = stages(device, 1)
    (ours,) = served(modules, device, in_flight=2)
    inputs = [randn(4, WIDTH, device=device, seed=n) for n in range(3)]
    first, second = ours(inputs[0]), ours(inputs[1])
    with pytest.raises(BatchError, match="2 calls of part 0 wait for their backward"):
        ours(inputs[2])
    with torch.no_grad():
        assert_close([ours(inputs[2])], [modules[0](inputs[2])], device)
    assert ours.forward.eager_steps == {"in-flight": 1}
    (first.sum() + second.sum()).backward()
    (modules[0](inputs[0]).sum() + modules[0](inputs[1]).sum()).backward()
    assert_close(gradients([ours]), gradients(modules), device)
    ours(inputs[2]).sum().backward()
    assert ours.forward.replays == 3


def test_by_default_further_calls_run_eagerly_and_one_warning_says_so(device, caplog):
    """A part used twice in a step, as in siamese networks."""
    modules = stages(device)
    encoder, head = served(modules, device)
    a, b = (randn(4, WIDTH, device=device, seed=n) for n in range(2))
    for one, two in ((encoder, head), modules):
        for _ in range(2):
            two(one(a) - one(b)).square().sum().backward()
    assert_close(gradients([encoder, head]), gradients(modules), device)
    assert (encoder.forward.replays, encoder.forward.eager_steps) == (2, {"in-flight": 2})
    assert caplog.text.count("pass in_flight=2") == 1


def test_results_and_gradients_are_the_callers(device):
    """Whatever is called later: without gradients, with them, and after a backward."""
    (module,) = stages(device, 1)
    (ours,) = served([module], device)
    inputs = [randn(4, WIDTH, device=device, seed=n) for n in range(4)]
    with torch.no_grad():
        predictions = [ours(x) for x in inputs]
        assert_close(predictions, [module(x) for x in inputs], device)
    assert ours.forward.replays == 4
    kept = []
    for x in inputs:
        result = ours(x)
        result.sum().backward()
        kept.append((result, [g.clone() for g in gradients([ours])]))
        ours.zero_grad()
    assert ours.forward.replays == 8
    for x, (result, grads) in zip(inputs, kept, strict=True):
        module.zero_grad()
        wanted = module(x)
        wanted.sum().backward()
        assert_close([result, *grads], [wanted, *gradients([module])], device)


def test_a_backward_may_run_twice_while_its_memory_is_there(device):
    (module,) = stages(device, 1)
    (ours,) = served([module], device)
    x = randn(4, WIDTH, device=device)
    for part in (module, ours):
        loss = part(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
    assert_close(gradients([ours]), gradients([module]), device)
    ours(x)
    with pytest.raises(BatchError, match=r"second time and too late: a later call .* in_flight="):
        loss.backward()


def test_a_call_whose_results_nobody_holds_is_not_in_flight(device):
    (ours,) = served(stages(device, 1), device, in_flight=1)
    x = randn(4, WIDTH, device=device)
    for _ in range(3):
        ours(x)
    assert ours.forward.replays == 3


def test_guarded_results_are_not_copied_and_late_use_raises(device):
    modules = stages(device)
    first, second = served(modules, device, results="guarded")
    x, weight = randn(4, WIDTH, device=device), randn(WIDTH, device=device).requires_grad_()
    for part in (modules, (first, second)):
        part[1](part[0](x)).sum().backward()
    assert_close(gradients([first, second]), gradients(modules), device)
    with torch.no_grad():
        kept = first(x)
        addresses = {kept.data_ptr()}
        assert_close([kept], [modules[0](x)], device)
        second(kept)
        assert float(kept.sum()) == pytest.approx(float(modules[0](x).sum()), rel=1e-3)
    product = (kept * weight).sum()
    with torch.no_grad():
        addresses.add(first(x + 1).data_ptr())
    assert len(addresses) == 1
    with pytest.raises(StaleOutputError, match="part 0"):
        kept.sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with pytest.raises(ConfigError, match='"copied" or "guarded"'):
        served(modules, device, results="fast")


class Deep(nn.Module):
    """Many intermediates that no backward needs, of the size of those that it does."""

    def forward(self, x):
        for _ in range(8):
            x = x + 1.0
        for _ in range(3):
            x = x.sin()
        for _ in range(8):
            x = x + 1.0
        return x


def test_other_graphs_write_to_nothing_that_a_backward_still_needs(device):
    """Graphs that were captured before, after, at other sizes, or share the pool, with any intermediates."""
    pool = GraphPool(device)

    def input_of(rows, seed=0):
        return randn(rows, 1000, device=device, seed=seed).requires_grad_()

    parts = make_graphed_callables(
        (Deep(), Deep(), Deep()), ((input_of(8),),) * 3, pool=pool, ladder=[4, 8], in_flight=3
    )
    f = graphed(Deep(), ladder=[4, 8], pool=pool)
    for part in parts:
        for rows in (8, 4):
            inputs = [input_of(rows, seed) for seed in range(2)]
            losses = [part(x).sum() for x in inputs]
            for other in (*parts, f):
                for n in (8, 3):
                    other(input_of(n, 5).detach())
            for other in parts:
                other(input_of(8, 6)).sum().backward()
            for loss, x in zip(losses, inputs, strict=True):
                loss.backward()
                got, x.grad = x.grad, None
                Deep()(x).sum().backward()
                assert_close([got], [x.grad], device)
    assert all(not part.forward.eager_steps for part in parts)


def test_a_parameter_changed_between_forward_and_backward_is_noticed_as_by_autograd(device):
    (module,) = stages(device, 1)
    (ours,) = served([module], device)
    x = randn(4, WIDTH, device=device)
    for part, error in ((module, RuntimeError), (ours, BatchError)):
        loss = part(x).sum()
        with torch.no_grad():
            part.two.bias.add_(1)  # not needed
        loss.backward()
        loss = part(x).sum()
        with torch.no_grad():
            part.two.weight.add_(1)
        with pytest.raises(error, match=r"in.?place"):
            loss.backward()
    assert_close(gradients([ours]), gradients([module]), device)


TWICE = {
    "derivative in the loss": lambda net, x: torch.autograd.grad(net(x).sum(), x, create_graph=True)[0],
    "second derivative": lambda net, x: torch.autograd.grad(
        torch.autograd.grad(net(x).sum(), x, create_graph=True)[0].sum(), x, create_graph=True
    )[0],
    "create_graph in backward": lambda net, x: net(x).sum().backward(create_graph=True),
    "hessian": lambda net, x: torch.autograd.functional.hessian(lambda y: net(y).sum(), x),
}


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("name", TWICE)
def test_differentiating_twice_raises_and_the_remedy_it_names_works(device, name):
    (module,) = stages(device, 1)
    (ours,) = served([module], device)
    x = randn(4, WIDTH, device=device).requires_grad_()
    with pytest.raises(ConfigError, match=r"part 0 is to be differentiated twice.*step_mode"):
        TWICE[name](ours, x)
    expected = TWICE[name](module, x)
    with step_mode("none"):
        result = TWICE[name](ours, x)
    if expected is not None:
        assert_close([result], [expected], device)
    if name.endswith("loss"):
        result.square().sum().backward()
        expected.square().sum().backward()
        for p in (*module.parameters(), *ours.parameters()):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        assert_close(gradients([ours]), gradients([module]), device)


def test_transforms_see_the_function(device):
    (module,) = stages(device, 1)
    (ours,) = served([module], device)
    x = randn(4, WIDTH, device=device)
    other = {name: 2 * p.detach() for name, p in module.named_parameters()}
    cases = [
        lambda net: torch.func.grad(lambda y: net(y).sum())(x),
        lambda net: torch.func.jvp(net, (x,), (x,))[1],
        lambda net: torch.func.hessian(lambda y: net(y).sum())(x[:1]),
        lambda net: torch.vmap(net)(torch.stack([x, -x])),
        lambda net: torch.func.functional_call(net, other, (x,)),
    ]
    for case in cases:
        assert_close([case(ours)], [case(module)], device)
    assert ours.forward.eager_steps == {"inside-transform": len(cases)}
    jacobian = torch.autograd.functional.jacobian
    assert_close([jacobian(ours, x)], [jacobian(module, x)], device)


class Frozen(nn.Module):
    """A backbone in eval mode, as it is fine-tuned."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


@pytest.mark.parametrize("by_input", [True, False])
@pytest.mark.parametrize("frozen", ["nothing", "norm", "everything"])
def test_a_backbone_in_eval_mode_gets_the_gradients_of_eager(device, by_input, frozen):
    module = Frozen().to(device).eval()
    {"nothing": nn.Module(), "norm": module.norm, "everything": module}[frozen].requires_grad_(False)
    ours = copy.deepcopy(module)
    x = randn(4, 2, 5, 5, device=device).requires_grad_(by_input)
    make_graphed_callables(ours, (x,), ladder=[2, 4])
    for rows in (4, 3):
        found = []
        for part in (ours, module):
            part.zero_grad()
            given = x[:rows].detach().requires_grad_(by_input)
            result = part(given)
            assert result.requires_grad == (by_input or frozen != "everything")
            if result.requires_grad:
                result.square().sum().backward()
            found.append([result.detach(), given.grad, *gradients([part])])
        assert [v is None for v in found[0]] == [v is None for v in found[1]]
        assert_close(*([v for v in values if v is not None] for values in found), device)
    assert (ours.forward.replays, ours.forward.eager_steps) == (2, {})


def test_what_was_frozen_or_unfrozen_since_has_the_gradients_of_eager(device, caplog):
    module = Frozen().to(device).eval()
    module.conv.requires_grad_(False)
    ours, x = copy.deepcopy(module), randn(4, 2, 5, 5, device=device)
    make_graphed_callables(ours, (x,))
    for change in (
        lambda part: part.conv.requires_grad_(True),
        lambda part: part.head.requires_grad_(False),
        lambda part: part.train(),
    ):
        for part in (ours, module):
            change(part)
            part.zero_grad()
            part(x).square().sum().backward()
        assert [g is None for g in gradients([ours])] == [g is None for g in gradients([module])]
        both = [[g for g in gradients([part]) if g is not None] for part in (ours, module)]
        assert_close(*both, device)
    y = x.clone().requires_grad_()
    make_graphed_callables(ours, (x,))
    ours(y).sum().backward()
    module(y.detach().requires_grad_()).sum().backward()
    assert y.grad is not None
    assert caplog.text.count("in another mode than at the capture") == 1
    assert "step.capture" not in caplog.text  # which parts do not have
    assert "frozen or unfrozen" in caplog.text
    assert "requires a gradient and did not in the samples" in caplog.text


def test_a_copy_of_a_module_with_graphs_has_weights_of_its_own(device):
    (module,) = stages(device, 1)
    (ours,) = served([module], device)
    x = randn(4, WIDTH, device=device)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        with torch.no_grad():
            assert_close([twin(x)], [module(x)], device)
            for parameter in twin.parameters():
                parameter.mul_(2)
            assert_close([ours(x)], [module(x)], device)
            assert not torch.allclose(twin(x), module(x))
        twin(x).sum().backward()
        assert all(p.grad is None for p in ours.parameters())
        assert all(p.grad is not None for p in twin.parameters())


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, more):
        return self.linear(x.relu_()) + more


def test_an_argument_that_a_part_changes_in_place_is_changed(device):
    torch.manual_seed(0)
    module = InPlace().to(device)
    ours, x, more = copy.deepcopy(module), randn(4, WIDTH, device=device), randn(4, WIDTH, device=device)
    make_graphed_callables(ours, (x.clone(), more), ladder=[2, 4])
    for rows in (4, 3):
        results = []
        for part in (ours, module):
            given = x[:rows].clone()
            results.append([part(given, more[:rows]) + given, given])
        assert_close(*results, device)
    assert ours.forward.replays == 2
    with pytest.raises(CaptureError, match="part 0 changes an argument in place that requires a gradient"):
        make_graphed_callables(copy.deepcopy(module), (x.clone().requires_grad_(), more))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gru, self.out = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 2)

    def forward(self, x, table):
        h, last = self.gru(x)
        return {"last": last, "positions": (h @ table).view(-1, WIDTH), "logits": self.out(h)}


def test_the_state_of_an_rnn_may_be_an_argument(device):
    torch.manual_seed(0)
    module = nn.LSTM(WIDTH, WIDTH, batch_first=True).to(device)
    ours, x = copy.deepcopy(module), randn(4, 3, WIDTH, device=device)
    state = tuple(randn(1, 4, WIDTH, device=device, seed=i) for i in range(2))
    make_graphed_callables(ours, (x, state))
    results = []
    for part in (ours, module):
        now = state
        for seed in range(3):
            y, now = part(randn(4, 3, WIDTH, device=device, seed=seed), tuple(s.detach() for s in now))
            y.square().mean().backward()
        results.append([y, *now, *gradients([part])])
    assert_close(*results, device)
    assert ours.forward.replays == 3


def test_results_with_rows_in_other_places_and_arguments_without_rows(device):
    """The last state of an RNN [layers, rows, D], all positions [rows * length, D], a table [D, D]."""
    module = Recurrent().to(device)
    ours, table = copy.deepcopy(module), randn(WIDTH, WIDTH, device=device).requires_grad_()
    x = randn(8, 3, WIDTH, device=device).requires_grad_()
    make_graphed_callables(ours, (x, table), ladder=[4, 8])
    for rows in (8, 5, 3):
        found = []
        for part in (ours, module):
            part.zero_grad()
            given, other = x[:rows].detach().requires_grad_(), table.detach().requires_grad_()
            result = part(given, other)
            sum(value.square().sum() for value in result.values()).backward()
            found.append([*result.values(), given.grad, other.grad, *gradients([part])])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert (ours.forward.replays, ours.forward.eager_steps) == (3, {})


def test_refusals_say_what_to_do(device):
    module, x = nn.Linear(WIDTH, WIDTH).to(device), randn(4, WIDTH, device=device)
    with pytest.raises(ConfigError, match=r"listed twice.*in_flight="):
        make_graphed_callables((module, module), ((x,), (x,)))
    with pytest.raises(ConfigError, match="in_flight must be at least 1"):
        make_graphed_callables(module, (x,), in_flight=0)
    with pytest.raises(CaptureError, match="sparse=False"):
        make_graphed_callables(
            nn.Embedding(9, 2, sparse=True, device=device), (torch.arange(4, device=device),)
        )
    module.extra = nn.Linear(2, 2).to(device)
    with pytest.raises(CaptureError, match=r"does not use extra\.weight, extra\.bias.*allow_unused_input"):
        make_graphed_callables(module, (x,))
