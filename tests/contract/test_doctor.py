"""`doctor` names every line that keeps a call from graphs, and changes nothing."""

import random
from pathlib import Path

import pytest
import torch

from contract.steps import WIDTH, randn, same
from ostinato.graphs import ObstacleWatch, eager_boundary, graphed

HERE = Path(__file__).name
LADDER = [1, 2, 4]


class Careless(torch.nn.Module):
    """Does most of what a capture forbids."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x):
        self.calls += 1
        self.total += x.sum(0).detach()
        y = self.layer(x)
        if y.sum().item() > 0:  # first
            y = y + 1
        for row in range(3):
            y = y + float(y[0, row])  # second
        y = y + y[y > 0].sum()  # third
        return y * y.nonzero().size(0) + torch.rand_like(y)  # fourth


def lines_of(diagnosis):
    return [obstacle.where.rpartition("# ")[2] for obstacle in diagnosis.obstacles]


def test_every_line_is_listed_in_order_with_how_often_and_what_to_do_instead(device):
    module = Careless().to(device)
    found = graphed(module, ladder=LADDER).doctor(randn(3, WIDTH, device=device))
    assert lines_of(found) == ["first", "second", "third", "fourth"]
    assert [obstacle.times for obstacle in found.obstacles] == [1, 3, 1, 1]
    assert [obstacle.what for obstacle in found.obstacles] == [
        *("Tensor.item", "Tensor.__float__", "tensor[mask]", "nonzero"),
    ]
    assert not found.is_healthy
    assert found.report is not None
    assert not found.report.graphs
    told = str(found)
    assert told.startswith("4 obstacles in "), told
    for obstacle in found.obstacles:
        assert HERE in obstacle.where
        assert "in forward" in obstacle.where
        assert obstacle.where in told
        assert obstacle.why in told
    assert "Tensor.__float__ (3 times)" in told
    assert "@eager_boundary" in told


def test_nothing_that_the_function_does_remains(device, caplog):
    torch.manual_seed(3)
    module = Careless().to(device)
    wrapper, x = graphed(module, ladder=LADDER), randn(3, WIDTH, device=device)
    before, states = x.clone(), (torch.get_rng_state(), random.getstate())
    draws = torch.rand(4, device=device)
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.manual_seed(3)
        draws = torch.rand(4, device=device)
        torch.manual_seed(3)
    wrapper.doctor(x)
    assert same(x, before)
    assert module.calls == 0
    assert not module.total.any()
    assert same(torch.rand(4, device=device), draws)
    assert random.getstate() == states[1]
    assert not wrapper.report().graphs
    assert not wrapper.report().eager_steps
    assert not caplog.records


def test_what_can_be_captured_is_captured_and_verified(device):
    layer = torch.nn.Linear(WIDTH, 5).to(device)
    wrapper = graphed(layer, ladder=LADDER)
    found = wrapper.doctor(randn(3, WIDTH, device=device))
    assert found.is_healthy
    assert found.obstacles == found.causes == ()
    assert found.verification.passed
    assert len(found.report.graphs) == 3
    assert str(found).startswith("healthy: 3 graphs captured and verified, ")
    assert not wrapper.report().graphs, "the wrapper has no graphs yet"


CAUSES = {
    "depends on the batch": lambda x: x / len(x),
    "one row for each of the batch": lambda x: x + torch.zeros(3, WIDTH, device=x.device),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_causes_that_are_no_line_are_told_too_and_once(device, cause):
    found = graphed(CAUSES[cause], ladder=LADDER).doctor(randn(3, WIDTH, device=device))
    assert found.obstacles == ()
    assert len(found.causes) == 1
    assert cause in found.causes[0]
    assert not found.is_healthy
    assert found.causes[0] in str(found)


def test_lines_and_other_causes_are_told_together(device):
    def both(x):
        return x * random.random() * x.sum().item()  # here

    found = graphed(both, ladder=LADDER).doctor(randn(3, WIDTH, device=device))
    assert lines_of(found) == ["here", "here"]
    assert [obstacle.what for obstacle in found.obstacles] == ["random.random", "Tensor.item"]
    assert [obstacle.is_refused for obstacle in found.obstacles] == [False, True]
    assert not found.causes, "what is said of a line is not said again"


def test_marked_functions_may_do_anything_if_the_capture_is_piecewise(device):
    @eager_boundary
    def peek(x):
        return x * x.sum().item()  # inside

    def step(x):
        return peek(x * 2) + 1

    x = randn(3, WIDTH, device=device)
    in_full = graphed(step, ladder=[3]).doctor(x)
    assert lines_of(in_full) == ["inside"]
    in_pieces = graphed(step, ladder=[3], mode="piecewise").doctor(x)
    assert in_pieces.obstacles == ()
    assert in_pieces.report.graphs[0].segments == 2


@pytest.fixture
def capture_query(device, monkeypatch):
    """A torch built without CUDA has no answer to whether a stream is being captured."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_what_a_function_does_only_outside_of_captures_does_not_count(device, capture_query):
    def step(x):
        if not torch.cuda.is_current_stream_capturing():
            print(x)
        return x + 1

    assert graphed(step, ladder=LADDER).doctor(randn(3, WIDTH, device=device)).is_healthy


def test_what_a_function_raises_only_in_captures_is_an_obstacle(device, capture_query):
    def step(x):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not while capturing")  # raised
        return x + 1

    found = graphed(step, ladder=LADDER).doctor(randn(3, WIDTH, device=device))
    assert lines_of(found) == ["raised"]
    assert found.obstacles[0].what == "RuntimeError: not while capturing"
    assert not found.is_healthy


def test_what_a_function_raises_anyway_is_the_callers(device):
    module = Careless().to(device)
    with pytest.raises(RuntimeError, match="must match"):
        graphed(module, ladder=LADDER).doctor(randn(3, WIDTH + 1, device=device))
    assert module.calls == 0
    assert not module.total.any()


def test_waiting_for_the_device_is_an_obstacle(device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    original = torch.cuda.synchronize

    def step(x):
        torch.cuda.synchronize()  # waits
        return x + 1

    found = graphed(step, ladder=LADDER).doctor(randn(3, WIDTH, device=device))
    assert lines_of(found)[0] == "waits"
    assert found.obstacles[0].what == "torch.cuda.synchronize"
    assert torch.cuda.synchronize is original


def test_an_argument_that_rules_graphs_out_is_named(device):
    found = graphed(lambda x, box: x, ladder=LADDER).doctor(randn(3, WIDTH, device=device), object())
    assert not found.is_healthy
    assert found.report is None
    assert "box is a object" in str(found)


def test_a_wrapper_without_graphs_is_examined_as_if_it_had_some(device):
    found = graphed(torch.neg, ladder=LADDER, mode="none").doctor(randn(3, WIDTH, device=device))
    assert found.is_healthy


def test_a_wrapper_that_serves_is_examined_without_harm(device):
    wrapper = graphed(lambda x: x * 2, ladder=LADDER)
    x = randn(3, WIDTH, device=device)
    assert same(wrapper(x), x * 2)
    assert wrapper.doctor(x).is_healthy
    assert same(wrapper(x), x * 2)
    assert wrapper.report().replays == 1 + (not wrapper.report().eager_steps)


def test_operators_that_decide_on_the_host_are_obstacles(device):
    def step(x):
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))  # decides

    x = randn(3, WIDTH, device=device)  # not watched: a copy to the device
    with ObstacleWatch() as watch:
        step(x)
    assert [found.where.rpartition("# ")[2] for found in watch.obstacles] == ["decides"]
    assert "'cond'" in watch.obstacles[0].why
    assert "(at " not in watch.obstacles[0].why
