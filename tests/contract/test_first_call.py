"""The first call is a call like any other: it fails as the function does, and what it makes is made once."""

import gc

import pytest
import torch

from contract.steps import WIDTH, close, key, make_runner, randn, reasons, rng_state, same, strictly, wrap
from ostinato.graphs import CaptureError, CaptureOptions

HINT = "run the step once before the capture"


# -- a first call that fails ---------------------------------------------------------------------------


def test_a_bad_first_call_raises_what_the_function_raises_and_the_next_one_is_served(device):
    def step(x):
        if x.size(1) != WIDTH:
            raise ValueError(f"{x.size(1)} columns")
        return x * 2

    f = wrap(step)
    for columns in (3, 5):
        with pytest.raises(ValueError, match=f"{columns} columns"):
            f(randn(3, columns, device=device))
    assert f.report().graphs == ()
    assert not f.report().failures
    x = randn(3, WIDTH, device=device)
    for _ in range(2):
        assert same(f(x), x * 2)
    assert (reasons(f), f.report().replays) == ({}, 2)


@pytest.mark.parametrize("strict", [False, True])
def test_the_very_exception_arrives_and_state_is_as_before(device, strict):
    counter, error, armed = torch.zeros(2, device=device), ValueError("not yet"), [True]

    def step(x):
        x.add_(1)
        counter.add_(1)
        if armed:
            raise error
        return x * counter.sum()

    f = wrap(step, options=CaptureOptions(freeze_gc=False, strict=strict))
    x = randn(3, WIDTH, device=device)
    given = x.clone()
    generator = rng_state(device)
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            f(x)
        assert caught.value is error
        assert counter.tolist() == [0, 0]
        assert same(x, given)
    assert same(rng_state(device), generator)
    armed.clear()
    for call in (1, 2, 3):
        assert close(f(x), (given + call) * 2 * call)
        assert close(x, given + call)
        assert counter.tolist() == [call, call]
    assert (reasons(f), f.report().replays) == ({}, 3)


def test_a_module_with_a_bad_first_call_is_served_afterwards(device):
    class Checked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x, *, scale=1.0):
            self.calls.add_(1)
            if scale <= 0:
                raise ValueError("scale must be positive")
            return x * scale

    module = Checked().to(device)
    f = wrap(module)
    x = randn(3, WIDTH, device=device)
    with pytest.raises(ValueError, match="positive"):
        f(x, scale=-1.0)
    assert module.calls.item() == 0
    for _ in range(2):
        assert same(f(x, scale=2.0), x * 2)
    assert module.calls.item() == 2
    assert (reasons(f), f.report().replays) == ({}, 2)


def test_a_bad_first_call_draws_nothing(device):
    armed = [True]

    def step(x):
        noise = torch.rand_like(x)
        if armed:
            raise ValueError("not yet")
        return x + noise

    f = wrap(step, [4])
    x = randn(4, WIDTH, device=device)
    torch.manual_seed(3)
    with pytest.raises(ValueError, match="not yet"):
        f(x)
    armed.clear()
    got = f(x).clone()
    torch.manual_seed(3)
    assert same(got, step(x))


def test_a_first_call_is_served_and_leaves_the_trace_of_one(device):
    counter = torch.zeros((), device=device)

    def step(x):
        counter.add_(1)
        return torch.rand_like(x) + counter

    f = wrap(step, [4])
    x = randn(4, WIDTH, device=device)
    torch.manual_seed(3)
    got = [f(x).clone() for _ in range(3)]
    after = rng_state(device)
    counter.zero_()
    torch.manual_seed(3)
    assert same(got, [step(x) for _ in range(3)])
    assert same(rng_state(device), after)
    assert (reasons(f), f.report().replays) == ({}, 3)


# -- state that the first call makes -------------------------------------------------------------------


class Momentum:
    """A step that makes its state when it first runs, as optimizers do."""

    def __init__(self, device):
        self.weight = torch.zeros(WIDTH, device=device)
        self.state = {}

    def __call__(self, x):
        gradient = x.sum(0)
        if "momentum" not in self.state:
            self.state["momentum"] = gradient.clone()
        else:
            self.state["momentum"].mul_(0.9).add_(gradient, alpha=0.5)
        self.weight.sub_(self.state["momentum"], alpha=0.1)
        return x + self.weight


class Training:
    """A step of an optimizer on one weight, whose gradient is written by hand."""

    def __init__(self, device, make):
        self.weight = torch.nn.Parameter(torch.ones(WIDTH, device=device))
        self.weight.grad = torch.zeros(WIDTH, device=device)
        self.optimizer = make([self.weight])

    def __call__(self, x):
        self.weight.grad.copy_(x.sum(0))
        self.optimizer.step()
        return x * self.weight


def sgd(device, **settings):
    return Training(device, lambda weights: torch.optim.SGD(weights, lr=0.1, foreach=False, **settings))


def adam(device):
    on_gpu = device.type == "cuda"
    return Training(
        device, lambda weights: torch.optim.Adam(weights, lr=0.1, foreach=False, capturable=on_gpu)
    )


LAZY = {
    "by hand": Momentum,
    "sgd": lambda device: sgd(device, momentum=0.9),
    "sgd with dampening": lambda device: sgd(device, momentum=0.9, dampening=0.5),
    "sgd with nesterov": lambda device: sgd(device, momentum=0.9, nesterov=True, weight_decay=0.1),
}


def follows(f, step, twin, device, sizes=(3, 4, 1, 3, 2)):
    """Calls through the wrapper do to the weight what eager calls do to its twin's."""
    for seed, n in enumerate(sizes):
        x = randn(n, WIDTH, device=device, seed=seed)
        with torch.no_grad():
            assert close(f(x), twin(x)), seed
        assert close(step.weight.detach(), twin.weight.detach()), seed
    return True


@pytest.mark.parametrize("name", LAZY)
def test_lazily_made_state_is_made_by_the_first_call_and_changed_once_by_each(device, name):
    step, twin = LAZY[name](device), LAZY[name](device)
    f = wrap(step)
    assert follows(f, step, twin, device)
    assert (reasons(f), f.report().replays) == ({"first-call": 1}, 4)


def test_a_first_call_above_the_limit_that_makes_state_is_right_too(device):
    step, twin = Momentum(device), Momentum(device)
    f = wrap(step)
    assert follows(f, step, twin, device, sizes=(7, 3, 6, 4))
    assert f.report().replays == 2


def test_adam_is_followed_whether_it_is_served_or_not(device):
    step, twin = adam(device), adam(device)
    f = wrap(step)
    assert follows(f, step, twin, device)
    assert reasons(f)["first-call"] == 1


def test_a_cache_that_the_first_call_makes_is_used_by_all(device):
    caches = {}

    def step(x):
        if "mask" not in caches:
            caches["mask"] = torch.arange(WIDTH, device=device) % 2
        return x * caches["mask"]

    f = wrap(step)
    for n in (3, 4, 1):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(f(x), x * (torch.arange(WIDTH, device=device) % 2))
    assert (reasons(f), f.report().replays) == ({"first-call": 1}, 2)


def test_state_is_made_once_by_the_call_after_one_that_failed(device):
    step, twin, armed = Momentum(device), Momentum(device), [True]

    def checked(x):
        if armed:
            raise ValueError("not yet")
        return step(x)

    f = wrap(checked)
    with pytest.raises(ValueError, match="not yet"):
        f(randn(3, WIDTH, device=device))
    armed.clear()
    assert follows(f, step, twin, device)
    assert (reasons(f), f.report().replays) == ({"first-call": 1}, 4)


# -- capture ahead of the first call -------------------------------------------------------------------


@pytest.mark.parametrize("name", LAZY)
def test_capturing_ahead_what_makes_its_state_lazily_is_refused_with_a_hint(device, name):
    step = LAZY[name](device)
    with pytest.raises(CaptureError, match=HINT):
        wrap(step, options=strictly()).capture(randn(3, WIDTH, device=device))


def test_the_hint_is_raised_or_in_the_report_where_nothing_is_strict(device):
    f = wrap(Momentum(device))
    said = []
    try:
        f.capture(randn(3, WIDTH, device=device))
    except CaptureError as error:
        said.append(str(error))
    said += f.report().failures.values()
    assert said
    assert all(HINT in cause for cause in said)
    assert f.report().graphs == ()


def test_a_runner_refuses_it_as_well(device):
    runner = make_runner(device, momentum_step(device), [2, 4], capture=False, options=strictly())
    with pytest.raises(CaptureError, match=HINT):
        runner.capture(progress=False)
    assert runner.graphs == {}


def momentum_step(device):
    step = Momentum(device)
    return lambda x: step(x)


@pytest.mark.parametrize("name", LAZY)
def test_a_step_that_ran_once_before_may_be_captured_ahead(device, name):
    step, twin = LAZY[name](device), LAZY[name](device)
    first = randn(3, WIDTH, device=device, seed=9)
    with torch.no_grad():
        step(first)
        twin(first)
    f = wrap(step)
    f.capture(first)
    assert close(step.weight.detach(), twin.weight.detach())
    assert follows(f, step, twin, device)
    assert (reasons(f), f.report().replays) == ({}, 5)


def test_a_runner_captures_a_step_that_ran_once_before(device):
    step, twin = Momentum(device), Momentum(device)
    first = randn(3, WIDTH, device=device, seed=9)
    step(first)
    twin(first)
    runner = make_runner(device, lambda x: step(x), [2, 4])
    assert key(4) in runner.graphs
    assert follows(lambda x: runner.run({"x": x}), step, twin, device)


@pytest.mark.parametrize("way", ["graphed", "runner"])
def test_state_that_is_made_once_and_only_read_may_be_captured_ahead(device, way):
    caches = {}

    def step(x):
        if "mask" not in caches:
            caches["mask"] = torch.arange(WIDTH, device=device) % 2
        return x * caches["mask"]

    if way == "graphed":
        f = wrap(step, options=strictly())
        f.capture(randn(3, WIDTH, device=device))
    else:
        runner = make_runner(device, step, [2, 4], options=strictly())
        f = lambda x: runner.run({"x": x})  # noqa: E731
    for n in (3, 4, 1):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(f(x), x * (torch.arange(WIDTH, device=device) % 2))


def test_what_lies_in_a_circle_of_references_is_no_state(device):
    """Autograd, transforms and compilers leave such circles; the collector comes when it likes."""

    class Holder:
        pass

    def step(x):
        holder = Holder()
        holder.itself, holder.made = holder, x * 3
        return holder.made + 1

    gc.collect()
    gc.disable()
    try:
        f = wrap(step, [2, 4])
        for seed in range(2):
            x = randn(3, WIDTH, device=device, seed=seed)
            assert same(f(x), step(x))
    finally:
        gc.enable()
    assert (reasons(f), f.report().replays) == ({}, 2)
