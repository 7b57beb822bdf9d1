"""Every optimizer and scheduler of torch around a captured step: what eager training does, from graphs."""

import copy
import logging
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import SWALR

from contract.training_loops import (
    VOCABULARY,
    captured,
    cross_entropy,
    fast_options,
    make_batches,
    make_model,
    replays,
    train_eagerly,
    twins,
)
from ostinato.graphs import CaptureOptions, ConfigError

STEPS = 10
BEHIND = "runs after the graph of forward and backward"


def matrices(model):
    return [p for p in model.parameters() if p.dim() == 2]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)


IN_THE_GRAPH = {
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.02, amsgrad=True),
    "AdamW": adamw,
    "SGD": sgd,
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.02),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.02),
    "Adamax": lambda m: torch.optim.Adamax(m.parameters(), lr=0.02),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), lr=0.02),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=0.5),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.02, momentum=0.5, centered=True),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.02),
}
BEHIND_IT = {
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.02),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.02),
    "Muon": lambda m: torch.optim.Muon(matrices(m), lr=0.02),
}
OPTIMIZERS = {**IN_THE_GRAPH, **BEHIND_IT}


def sequential(optimizer):
    parts = [schedulers.LinearLR(optimizer), schedulers.CosineAnnealingLR(optimizer, 6)]
    return schedulers.SequentialLR(optimizer, parts, [3])


def chained(optimizer):
    return schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer, total_iters=3), schedulers.ExponentialLR(optimizer, 0.9)]
    )


SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda i: 1 / (i + 1)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda i: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5]),
    "ConstantLR": schedulers.ConstantLR,
    "LinearLR": schedulers.LinearLR,
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4),
    "PolynomialLR": schedulers.PolynomialLR,
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.05, step_size_up=4, cycle_momentum=False),
    "SWALR": lambda o: SWALR(o, 0.001, anneal_epochs=4),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.05, total_steps=20, cycle_momentum=False),
}
CYCLING = {
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.05, total_steps=20),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.05, step_size_up=4),
}


def advance(scheduler, loss):
    if isinstance(scheduler, schedulers.ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()


def assert_like_eager(
    device, optimizer, scheduler=None, *, accumulate=1, made_late=False, options=None, **settings
):
    """In doubles, where rates and counts that are rounded to float32 would show. (On a GPU, fused kernels
    take rates in no other type.)"""
    ours, theirs = twins(make_model(device).double())
    mine, other = optimizer(ours), optimizer(theirs)
    batches = make_batches(device, [8] * STEPS * accumulate)
    followed = None if scheduler is None or made_late else scheduler(mine)
    step = captured(ours, mine, accumulate=accumulate, options=options or fast_options(), **settings)
    beside = None if scheduler is None or made_late else scheduler(other)
    found, expected = [], []
    for number in range(STEPS):
        given = batches[number * accumulate : (number + 1) * accumulate]
        found += [step(*batch).item() for batch in given]
        expected += train_eagerly(theirs, other, given, accumulate=accumulate, **settings)
        if followed is not None:
            advance(followed, expected[-1])
            advance(beside, expected[-1])
        if made_late and number == 1:
            followed, beside = scheduler(mine), scheduler(other)
    is_on_gpu = device.type == "cuda"
    assert found == pytest.approx(expected, rel=1e-4 if is_on_gpu else 1e-6)
    pairs = [*zip(ours.parameters(), theirs.parameters(), strict=True)]
    difference = max(float((one - other).norm() / other.norm()) for one, other in pairs)
    keeps_float32 = type(mine).__name__ in ("NAdam", "ASGD")  # also where it is eager
    assert difference < (1e-4 if is_on_gpu else 1e-7 if keeps_float32 else 1e-9)
    assert step.report().eager_steps == {"first-call": accumulate}
    assert replays(step) >= (STEPS - 1) * accumulate - 1
    return step, mine


def kinds(step):
    return {row.descriptor.split("extra=")[1].strip("'") for row in step.report().graphs}


def some(table, quick):
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in table]


@pytest.mark.parametrize("name", some(OPTIMIZERS, ["Muon", "RMSprop"]))
def test_every_optimizer_of_torch(device, name, caplog):
    step, _ = assert_like_eager(device, OPTIMIZERS[name])
    assert (BEHIND in caplog.text) == (name in BEHIND_IT)
    assert step.skipped == 0


class Scaled(nn.Module):
    """By a parameter, perhaps of another type."""

    def __init__(self, device, dtype):
        super().__init__()
        self.inside = make_model(device).double()
        self.scale = nn.Parameter(torch.ones((), device=device, dtype=dtype))

    def forward(self, ids):
        return (self.inside(ids) * self.scale).real


@pytest.mark.parametrize(("dtype", "begins"), [(torch.float32, 0), (torch.complex128, 0), (torch.float64, 2)])
def test_counts_beside_other_types_and_of_parameters_that_begin_later(device, dtype, begins):
    ours, theirs = twins(Scaled(device, dtype))
    mine, other = (torch.optim.RAdam(model.parameters(), lr=0.02) for model in (ours, theirs))
    step = captured(ours, mine)
    for number, batch in enumerate(make_batches(device, [8] * 8)):
        for model in (ours, theirs):
            model.inside.requires_grad_(number >= begins)
        step(*batch)
        train_eagerly(theirs, other, [batch])
    for one, like in zip(matrices(ours), matrices(theirs), strict=True):
        torch.testing.assert_close(one, like, rtol=0, atol=1e-6)


def test_the_compiler_of_torch_may_have_changed_the_optimizers(device, monkeypatch):
    """Once it is loaded, it puts functions of its own in the place of their methods."""
    for kind in (torch.optim.RAdam, torch.optim.Adam, torch.optim.AdamW):

        def stand_in(*args, method=kind._init_group, **kwargs):
            return method(*args, **kwargs)

        monkeypatch.setattr(kind, "_init_group", stand_in)
    for make in (torch.optim.RAdam, lambda parameters: torch.optim.AdamW(parameters, fused=False)):
        ours, theirs = twins(make_model(device).double())
        batches = make_batches(device, [8] * 4)
        step = captured(ours, make(ours.parameters()))
        for batch in batches:
            step(*batch)
        train_eagerly(theirs, make(theirs.parameters()), batches)
        for one, like in zip(matrices(ours), matrices(theirs), strict=True):
            torch.testing.assert_close(one, like, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", some(SCHEDULERS, ["SequentialLR"]))
def test_every_scheduler_of_torch(device, name, caplog):
    assert_like_eager(device, adamw, SCHEDULERS[name])
    assert BEHIND not in caplog.text, "a learning rate is a tensor that graphs read"


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "make",
    [
        adamw,
        pytest.param(sgd, marks=pytest.mark.slow),
        pytest.param(IN_THE_GRAPH["NAdam"], marks=pytest.mark.slow, id="nadam"),
    ],
)
@pytest.mark.parametrize("name", some(CYCLING, ["OneCycleLR"]))
def test_a_scheduler_that_cycles_momentum(device, name, make, accumulate, caplog):
    step, _ = assert_like_eager(device, make, CYCLING[name], accumulate=accumulate, clip_norm=0.5)
    assert len([line for line in caplog.messages if BEHIND in line]) == 1
    assert kinds(step) <= {"judge", "accumulate"}


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Detected call")
def test_a_scheduler_that_is_made_when_graphs_are_there(device, caplog):
    assert_like_eager(device, adamw, SCHEDULERS["OneCycleLR"], made_late=True)
    assert BEHIND not in caplog.text, "what it notes in the groups is nothing that the optimizer reads"


class Counting(torch.optim.Optimizer):
    """Keeps its count in Python and makes its state anew, as many do."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.1, "drag": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["average"] = state.get("average", 0) * 0.5 + p.grad
                p.sub_(state["average"], alpha=group["lr"] / state["count"] + group["drag"])


def gently() -> CaptureOptions:
    return CaptureOptions(freeze_gc=False)


def test_an_optimizer_that_no_graph_can_keep_steps_behind_it(device, caplog):
    _, optimizer = assert_like_eager(device, Counting, options=gently())
    assert "Counting keeps average, count in Python" in caplog.text
    assert {state["count"] for state in optimizer.state.values()} == {STEPS}, "trials count for nothing"


class CountsAside(torch.optim.Optimizer):
    """Keeps its count in an attribute, and looks far ahead in every third step."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.1})
        self.count, self.slow = 0, [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            p.sub_(p.grad * self.param_groups[0]["lr"] / self.count)
            if self.count % 3 == 0:
                p.copy_(slow.lerp_(p, 0.5))


class KeepsLists(torch.optim.Optimizer):
    """Keeps two moments of each parameter in a list."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["moments"] = [torch.zeros_like(p), torch.zeros_like(p)]
            first, second = state["moments"]
            first.lerp_(p.grad, 0.1)
            second.lerp_(p.grad.square(), 0.1)
            p.sub_(first / (second.sqrt() + 0.1) * self.param_groups[0]["lr"])


class KeepsOneForAll(CountsAside):
    """Keeps the mean norm of gradients in a tensor of its own, which it assigns."""

    @torch.no_grad()
    def step(self, closure=None):
        params, state = self.param_groups[0]["params"], self.state["of all"]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        state["norm"] = state.get("norm", norm) * 0.5 + norm * 0.5
        for p in params:
            p.sub_(p.grad / state["norm"] * self.param_groups[0]["lr"])


class WantsNumbers(Counting):
    """Refuses a learning rate that is no float."""

    def step(self, closure=None):
        assert all(type(group["lr"]) is float for group in self.param_groups)
        super().step()


class Lion(torch.optim.Optimizer):
    """As its authors published it: the rate becomes the `alpha` of an operation, which is a number."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state, (first, second) = self.state[p], group["betas"]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.add_((average * first + p.grad * (1 - first)).sign_(), alpha=-group["lr"])
                average.mul_(second).add_(p.grad, alpha=1 - second)


class Layerwise(torch.optim.Optimizer):
    """LARS: rates of layers by their norms, decided on the device, and the root of a rate in Python."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.04, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                ratio = p.norm() / (p.grad.norm() + 1e-6)
                moved = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                moved.mul_(group["momentum"]).add_(p.grad * ratio * 0.01 * math.sqrt(group["lr"]))
                p.sub_(moved)


class Sophia(torch.optim.Optimizer):
    """Clips by a curvature that it follows; skips its work where the rate is zero."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.01, "betas": (0.9, 0.95), "rho": 0.04})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["lr"] > 0:
                continue
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=torch.zeros(()), m=torch.zeros_like(p), h=torch.zeros_like(p))
                state["step"] += 1
                state["m"].lerp_(p.grad, 1 - group["betas"][0])
                state["h"].lerp_(p.grad.square(), 1 - group["betas"][1])
                ratio = (state["m"].abs() / (group["rho"] * state["h"] + 1e-15)).clamp(None, 1)
                p.addcmul_(state["m"].sign(), ratio, value=-group["lr"])


class KeepsItsRate(torch.optim.Optimizer):
    """Rescales its momentum when the rate changes."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.1, "last": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                moved = state.setdefault("moved", torch.zeros_like(p))
                moved.mul_(0.5 * group["lr"] / state.get("rate", group["lr"])).add_(p.grad * group["lr"])
                state["rate"] = group["lr"]
                p.sub_(moved)


class SetsItsRate(torch.optim.Optimizer):
    """Anneals by itself."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"])
            group["lr"] = group["lr"] * 0.9


class LooksAhead(torch.optim.Optimizer):
    """Around another optimizer, whose groups and state are its own."""

    def __init__(self, model):
        inside = torch.optim.AdamW(model.parameters(), lr=0.02)
        super().__init__(inside.param_groups, {})
        self.inside, self.param_groups, self.count = inside, inside.param_groups, 0
        self.slow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def step(self, closure=None):
        self.inside.step()
        self.count += 1
        if self.count % 3 == 0:
            for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                p.copy_(slow.lerp_(p, 0.5))


STRANGERS = [Lion, Layerwise, Sophia, KeepsItsRate, SetsItsRate, LooksAhead]


@pytest.mark.parametrize("scheduler", [None, "LambdaLR"])
@pytest.mark.parametrize("kind", STRANGERS)
def test_an_optimizer_that_wants_its_rate_as_a_number(device, kind, scheduler, caplog):
    """The runtime makes it a tensor, so whoever wrote the optimizer is not at fault."""
    step, optimizer = assert_like_eager(
        device, kind, SCHEDULERS[scheduler] if scheduler else None, options=gently()
    )
    assert len(caplog.messages) == 1, "one cause, one warning"
    assert BEHIND in caplog.text
    assert kinds(step) == {"judge"}
    assert type(optimizer.param_groups[0]["lr"]) is float
    if kind is Sophia and device.type == "cuda":
        assert "keeps step on the host" in caplog.text, "its own count"
    elif kind in (Lion, Layerwise, Sophia):
        assert "Nothing is wrong" in caplog.text
        assert "test_training_optimizers.py:" in caplog.text, "the line that wants a number"


@pytest.mark.parametrize("kind", [CountsAside, KeepsLists, KeepsOneForAll, WantsNumbers])
def test_state_that_lies_elsewhere_counts_no_trials_and_is_in_no_graph(device, kind, caplog):
    assert_like_eager(device, kind, options=gently())
    assert BEHIND in caplog.text


class FitsIn(torch.optim.Optimizer):
    """One that a graph can keep, with a number of its own."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.1})
        self.drag = 0.0

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_((p.grad + p * self.drag) * self.param_groups[0]["lr"])


class OfOwnRate(torch.optim.Optimizer):
    """Its learning rate is its own affair, as that of Adafactor in transformers."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": None})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.1 * parameter.grad / parameter.grad.norm()


def test_an_optimizer_may_have_no_learning_rate(device):
    _, optimizer = assert_like_eager(device, lambda model: OfOwnRate(model.parameters()))
    assert optimizer.state_dict()["param_groups"][0]["lr"] is None


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_one_that_takes_parameters_one_by_one_steps_behind(device, name):
    """It wants a number as its learning rate, and is no reason for steps without a graph."""
    kind = getattr(torch.optim, name)
    options = CaptureOptions(freeze_gc=False)
    make = lambda model: kind(model.parameters(), lr=0.02, foreach=False)  # noqa: E731
    step, _ = assert_like_eager(device, make, options=options)
    assert kinds(step) == {"judge"}


class MovesParameters(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad


def test_an_optimizer_that_moves_parameters_runs_without_a_graph(device, caplog):
    ours, theirs = twins(make_model(device))
    batches = make_batches(device, [8] * 4)
    options = CaptureOptions(freeze_gc=False)
    step = captured(ours, MovesParameters(ours.parameters(), {"lr": 0.1}), options=options)
    found = [step(*batch).item() for batch in batches]
    assert found == train_eagerly(theirs, MovesParameters(theirs.parameters(), {"lr": 0.1}), batches)
    assert step.report().eager_steps == {"first-call": 1, "capture-failed": 3}
    assert "MovesParameters gives parameters new memory" in caplog.text


class Around(torch.optim.Optimizer):
    """Forgets about its base."""

    def __init__(self, inside):
        self.inside, self.param_groups, self.defaults = inside, inside.param_groups, inside.defaults
        self.state = inside.state

    def step(self, closure=None):
        self.inside.step()


def test_an_optimizer_that_is_none_to_torch_is_refused(device):
    model = make_model(device)
    with pytest.raises(ConfigError, match="Around was not initialised by torch"):
        captured(model, Around(sgd(model)))


def test_an_attribute_that_an_optimizer_reads_may_change(device, caplog):
    ours, theirs = twins(make_model(device).double())
    mine, other = FitsIn(ours), FitsIn(theirs)
    step, found, expected = captured(ours, mine), [], []
    for number, batch in enumerate(make_batches(device, [8] * 6)):
        mine.drag = other.drag = 0.5 if number >= 3 else 0.0
        found.append(step(*batch).item())
        expected += train_eagerly(theirs, other, [batch])
    is_on_gpu = device.type == "cuda"
    assert found == pytest.approx(expected, rel=1e-4 if is_on_gpu else 1e-6)
    assert "drag in its groups changed" in caplog.text


def test_a_learning_rate_that_is_a_tensor_may_be_written(device):
    ours, theirs = twins(make_model(device))
    rates = [torch.tensor(0.02, device=device) for _ in range(2)]
    mine, other = (
        torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
        for model, rate in zip((ours, theirs), rates, strict=True)
    )
    step, found, expected = captured(ours, mine), [], []
    for batch in make_batches(device, [8] * 6):
        found.append(step(*batch).item())
        expected += train_eagerly(theirs, other, [batch])
        for rate in rates:
            rate.mul_(0.5)
    is_on_gpu = device.type == "cuda"
    assert found == pytest.approx(expected, rel=1e-4 if is_on_gpu else 1e-6)
    assert mine.param_groups[0]["lr"] is rates[0]
    assert step.report().eager_steps == {"first-call": 1}


def test_its_update_is_skipped_where_gradients_are_not_finite(device):
    model = make_model(device)
    optimizer = Counting(model)
    factor = torch.ones((), device=device)
    step = captured(model, optimizer, lambda o, t: o.square().mean() * factor, options=gently())
    batch = make_batches(device, [8])[0]
    step(*batch)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    factor.fill_(float("nan"))
    step(*batch)
    assert step.skipped == replays(step) == 1
    assert all(torch.equal(value, before[0][key]) for key, value in model.state_dict().items())
    assert {state["count"] for state in optimizer.state.values()} == {1}
    factor.fill_(1)
    step(*batch)
    assert {state["count"] for state in optimizer.state.values()} == {2}


@pytest.mark.slow
def test_cycled_updates_are_skipped_on_the_device(device):
    model = make_model(device)
    optimizer = adamw(model)
    scheduler = CYCLING["OneCycleLR"](optimizer)
    factor = torch.ones((), device=device)
    step = captured(model, optimizer, lambda o, t: o.square().mean() * factor)
    batch = make_batches(device, [8])[0]
    for _ in range(3):
        step(*batch)
        scheduler.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    factor.fill_(float("inf"))
    step(*batch)
    assert step.skipped == 1
    assert all(torch.equal(value, before[0][key]) for key, value in model.state_dict().items())
    now = optimizer.state_dict()["state"]
    assert all(torch.equal(now[i][key], value) for i in now for key, value in before[1][i].items())


def test_a_number_that_moved_for_good_is_captured_anew_when_asked(device, caplog):
    ours, theirs = twins(make_model(device))
    mine, other = adamw(ours), torch.optim.AdamW(theirs.parameters(), lr=0.02, fused=True)
    step = captured(ours, mine)
    found, expected = [], []
    for number, batch in enumerate(make_batches(device, [8] * 6)):
        for group in (*mine.param_groups, *other.param_groups) if number == 2 else ():
            group["weight_decay"] = 0.5
        if number == 4:
            step.capture(*batch)
        found.append(step(*batch).item())
        expected += train_eagerly(theirs, other, [batch])
    is_on_gpu = device.type == "cuda"
    assert found == pytest.approx(expected, rel=1e-4 if is_on_gpu else 1e-6)
    assert "weight_decay in its groups changed" in caplog.text
    assert kinds(step) == {"update"}
    assert replays(step) == 2


@pytest.mark.parametrize("since", [0, 2])
@pytest.mark.parametrize("whose", ["its own", "all optimizers"])
def test_hooks_of_an_optimizer_are_called_in_every_step(device, whose, since, caplog):
    model = make_model(device)
    optimizer = adamw(model)
    called, handles = [], []
    step = captured(model, optimizer)
    register = optimizer.register_step_post_hook if whose == "its own" else register_optimizer_step_post_hook
    for number, batch in enumerate(make_batches(device, [8] * 4)):
        if number == since:
            handles.append(register(lambda *_: called.append(1)))
        step(*batch)
    handles[0].remove()
    assert len(called) == 4 - since
    assert kinds(step) == {"judge"}
    assert "it has hooks" in caplog.text


def test_hooks_of_an_optimizer_of_doubles_make_tensors_of_the_usual_type(device):
    model = make_model(device).double()
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.1)
    made = []
    optimizer.register_step_post_hook(lambda *_: made.append(torch.zeros(()).dtype))
    step = captured(model, optimizer)
    for batch in make_batches(device, [8] * 2):
        step(*batch)
    assert made == [torch.float32] * 2


def test_hooks_of_an_optimizer_that_nobody_knows_count_no_trials(device):
    model = make_model(device)
    optimizer = type("Own", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    step = captured(model, optimizer, options=CaptureOptions(freeze_gc=False))
    for batch in make_batches(device, [8] * 3):
        step(*batch)
    assert len(called) == 3


def test_two_steps_may_share_an_optimizer(device):
    ours, theirs = twins(make_model(device))
    mine, other = adamw(ours), torch.optim.AdamW(theirs.parameters(), lr=0.02, fused=True)
    losses = (cross_entropy, lambda logits, targets: cross_entropy(logits, targets) + logits.square().mean())
    steps = [captured(ours, mine, loss_fn) for loss_fn in losses]
    found, expected = [], []
    for number, batch in enumerate(make_batches(device, [8] * 6)):
        found.append(steps[number % 2](*batch).item())
        expected += train_eagerly(theirs, other, [batch], loss_fn=losses[number % 2])
    assert found == expected
    assert [replays(step) for step in steps] == [2, 2]
    assert mine.state_dict()["param_groups"][0]["fused"] is None, "as it was asked for"


def test_a_checkpoint_has_the_learning_rate_that_was_given(device):
    """On the device it is rounded, where an optimizer has no float64."""
    model = make_model(device)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.02)
    step = captured(model, optimizer)
    batches = make_batches(device, [8] * 6)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.9**number)
    for number, batch in enumerate(batches):
        step(*batch)
        if number == 2:
            assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.02
            rates.step()
            assert optimizer.state_dict()["param_groups"][0]["lr"] == pytest.approx(0.018, rel=1e-7)
            optimizer.param_groups[0]["lr"] = 0.3
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.3


def test_a_step_is_made_anew_when_a_group_was_added(device):
    ours, theirs = twins(nn.ModuleList([make_model(device), nn.Linear(VOCABULARY, VOCABULARY)]).to(device))
    optimizers = [torch.optim.AdamW(model[0].parameters(), lr=0.02, fused=True) for model in (ours, theirs)]
    found, expected = [], []
    for number, batch in enumerate(make_batches(device, [8] * 6)):
        models = [model[0] if number < 3 else nn.Sequential(*model) for model in (ours, theirs)]
        for model, optimizer in zip((ours, theirs), optimizers, strict=True) if number == 3 else ():
            optimizer.add_param_group({"params": [*model[1].parameters()], "lr": 0.5})
        if number in (0, 3):
            step = captured(models[0], optimizers[0])
        found.append(step(*batch).item())
        expected += train_eagerly(models[1], optimizers[1], [batch])
        for optimizer in optimizers:
            optimizer.load_state_dict(optimizer.state_dict())
    assert found == expected
    saved = [optimizer.state_dict()["param_groups"] for optimizer in optimizers]
    assert saved[0] == saved[1]


@pytest.mark.slow
def test_a_run_with_a_cycling_scheduler_goes_on_from_a_checkpoint(device):
    batches = make_batches(device, [8] * 8)

    def begin():
        model = make_model(device)
        optimizer = adamw(model)
        scheduler = CYCLING["OneCycleLR"](optimizer)
        return model, optimizer, scheduler, captured(model, optimizer)

    def train(parts, given):
        losses = []
        for batch in given:
            losses.append(parts[3](*batch).item())
            parts[2].step()
        return losses

    first = begin()
    train(first, batches[:4])
    saved = copy.deepcopy([part.state_dict() for part in first])
    losses = train(first, batches[4:])
    second = begin()
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    assert train(second, batches[4:]) == losses


# -- a length that never varies -----------------------------------------------------------------------


def test_without_a_ladder_the_first_length_is_the_rung(device, caplog):
    model = make_model(device)
    step = captured(model, adamw(model), ladder=None)
    for length in (8, 8, 5, 8):
        step(*make_batches(device, [length])[0])
    assert replays(step) == 3, "a shorter one is padded"
    assert not caplog.messages
    step(*make_batches(device, [11])[0])
    step(*make_batches(device, [11])[0])
    assert step.report().eager_steps["larger-than-max"] == 2
    assert len([line for line in caplog.messages if "pass ladder=" in line]) == 1


@pytest.mark.slow
def test_images_and_vectors_need_no_ladder(device):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5)).to(device)
    step = captured(model, sgd(model), nn.functional.cross_entropy, ladder=None)
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(device)
    losses = [float(step(images, torch.arange(4, device=device))) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert replays(step) == 3


def test_a_vector_may_be_as_long_as_the_first_batch_by_chance(device):
    class Told(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.told = make_model(device), nn.Linear(8, VOCABULARY, device=device)

        def forward(self, ids, vector):
            return self.model(ids) + self.told(vector)[:, None]

    ours, theirs = twins(Told())
    step, other = captured(ours, sgd(ours)), sgd(theirs)
    vector = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).to(device)
    for number, length in enumerate((8, 8, 5, 5, 8, 5)):
        ids, targets = make_batches(device, [length])[0]
        if number == 3:
            step.capture((ids, vector), targets)
        loss = cross_entropy(theirs(ids, vector), targets)
        other.zero_grad()
        loss.backward()
        other.step()
        assert step((ids, vector), targets).item() == pytest.approx(loss.item(), rel=1e-5)
    assert step.report().eager_steps["unseen-signature"] == 1
    assert replays(step) == 4


def test_a_summary_may_be_as_long_as_its_text_by_chance(device):
    """Its length goes ways of its own."""

    def nothing_else(outputs, targets):
        return cross_entropy(outputs[:, : targets.size(1)], targets)

    ours, theirs = twins(make_model(device))
    step = captured(ours, sgd(ours), nothing_else, ladder=[8])
    batches = [
        (x, y[:, :length])
        for (x, y), length in zip(make_batches(device, [8] * 5), (8, 5, 8, 3, 5), strict=True)
    ]
    found = [step(*batch).item() for batch in batches]
    assert found == pytest.approx(train_eagerly(theirs, sgd(theirs), batches, loss_fn=nothing_else), rel=1e-5)
    assert step.report().eager_steps["unseen-signature"] == 3


def test_padding_is_tried_with_contiguous_batches(device):
    """Models of transformers call view() on their labels."""
    model = make_model(device)
    step = captured(
        model, sgd(model), lambda o, t: cross_entropy(o.view(-1, VOCABULARY)[None], t.view(-1)), ladder=[8]
    )
    for inputs, targets in make_batches(device, [8, 8, 5]):
        step(inputs, targets.contiguous())
    assert step.report().eager_steps == {"first-call": 1}


def test_batches_of_other_rows_are_named_once(device, caplog):
    model = make_model(device)
    step = captured(model, adamw(model))
    for rows in (2, 2, 3, 3):
        step(*make_batches(device, [8], rows=rows)[0])
    assert step.report().eager_steps["unseen-signature"] == 2
    with caplog.at_level(logging.WARNING):
        assert len([line for line in caplog.messages if "step.capture(inputs, targets)" in line]) == 1
    assert fast_options().strict
