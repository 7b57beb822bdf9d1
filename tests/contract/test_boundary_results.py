"""What an eager boundary may return: tensors of any strides, also those with several places in one memory."""

import pytest
import torch

from contract.steps import WIDTH, CallCounter, eager_padded, make_runner, randn, same, wrap
from ostinato.graphs import GraphMode, eager_boundary

PIECEWISE = GraphMode.PIECEWISE

EXPANDED = {
    "columns": lambda h: h.mean(1, keepdim=True).expand(-1, WIDTH),
    "columns of the argument": lambda h: h[:, :1].expand(-1, WIDTH),
    "rows of a table": lambda h: torch.arange(WIDTH, device=h.device, dtype=h.dtype).expand(len(h), WIDTH),
    "a scalar": lambda h: torch.ones((), device=h.device).expand(len(h), WIDTH),
    "a scalar of the argument": lambda h: h[0, 0].expand(len(h), WIDTH),
    "expand_as": lambda h: (h[:, 0] * 2).unsqueeze(1).expand_as(h),
    "broadcast": lambda h: torch.broadcast_to(h.sum(1, keepdim=True), h.shape),
}


def agrees(runner, device):
    for seed, n in enumerate((4, 1, 3, 2, 4)):
        batch = {"x": randn(n, WIDTH, device=device, seed=seed)}
        wanted = eager_padded(runner, batch)
        assert same(runner.run(batch), wanted[:n]), (seed, n)
    return True


@pytest.mark.parametrize("name", EXPANDED)
def test_a_boundary_may_return_an_expanded_tensor(device, name):
    counter = CallCounter(EXPANDED[name])
    marked = eager_boundary(counter)
    runner = make_runner(device, lambda x: marked(x + 1) * 2 + x, [2, 4], mode=PIECEWISE)
    assert {row.segments for row in runner.report().graphs} == {2}
    assert agrees(runner, device)
    counter.calls = 0
    runner.run({"x": randn(3, WIDTH, device=device)})
    assert counter.calls == 1


def test_an_expanded_tensor_may_be_the_result_of_the_step(device):
    marked = eager_boundary(lambda h: h.mean(1, keepdim=True).expand(-1, WIDTH))
    runner = make_runner(device, lambda x: marked(x + 1), [2, 4], mode=PIECEWISE)
    assert agrees(runner, device)


def test_expanded_and_plain_tensors_come_back_together(device):
    @eager_boundary
    def attend(h):
        return {"plain": h * 3, "wide": h[:, None, :1].expand(-1, 3, WIDTH)}

    def step(x):
        out = attend(x * 2)
        return out["plain"] + out["wide"].sum(1)

    assert agrees(make_runner(device, step, [2, 4], mode=PIECEWISE), device)


def test_two_boundaries_with_expanded_results_follow_each_other(device):
    first = eager_boundary(lambda h: h.mean(1, keepdim=True).expand(-1, WIDTH))
    second = eager_boundary(lambda h, g: (h + g)[:, :1].expand(-1, WIDTH))

    def step(x):
        h = first(x + 1)
        return second(h * 2, h) + h

    assert agrees(make_runner(device, step, [2, 4], mode=PIECEWISE), device)


def test_graphed_serves_a_boundary_with_an_expanded_result(device):
    marked = eager_boundary(lambda h: h.mean(1, keepdim=True).expand(-1, WIDTH))
    step = lambda x: marked(x + 1) * 2  # noqa: E731
    f = wrap(step, mode="piecewise")
    for n in (3, 1, 4):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(f(x), step(x))
    assert f.report().replays == 3
    assert f.verify().passed
