"""Unguarded results: new objects over the same memory in every replay; autograd knows when it is gone."""

import pytest
import torch

from contract.steps import WIDTH, make_runner, randn, same
from ostinato.graphs import BatchShape, CaptureOptions, GraphMode, GraphPool


def doubled(x):
    return x * 2 + 1


def served(function, sizes=(2, 4), *, device, **settings):
    """A function of one batch, run from the graphs of a runner whose results are not copied."""
    runner = make_runner(device, function, sizes, results="unguarded", **settings)
    return lambda x: runner.run({"x": x})


def weights(device):
    return randn(WIDTH, device=device, seed=7).requires_grad_()


@pytest.mark.parametrize("n", [3, 4])
def test_every_call_returns_a_new_object_at_the_same_address(device, n):
    f = served(doubled, [4], device=device)
    outs = [f(randn(n, WIDTH, device=device, seed=seed)) for seed in range(4)]
    assert len({id(out) for out in outs}) == 4
    assert len({out.data_ptr() for out in outs}) == 1
    assert same(outs[3], doubled(randn(n, WIDTH, device=device, seed=3)))


def test_every_leaf_of_a_tree_is_a_new_object(device):
    f = served(lambda x: {"a": x * 2, "b": (x + 1, [x.sum(1)])}, [4], device=device)
    x = randn(3, WIDTH, device=device)
    first, second = f(x), f(x)
    assert first["a"] is not second["a"]
    assert first["b"][0] is not second["b"][0]
    assert first["b"][1][0] is not second["b"][1][0]


def test_a_runner_hands_out_new_objects_too_also_when_it_reruns(device):
    runner = make_runner(device, doubled, [4], results="unguarded")
    batch = {"x": randn(3, WIDTH, device=device)}
    outs = [runner.run(batch), runner.run(batch), runner.rerun(BatchShape.decode(3))]
    assert len({id(out) for out in outs}) == 3
    assert len({out.data_ptr() for out in outs}) == 1


@pytest.mark.parametrize("n", [3, 4])
def test_gradients_flow_through_what_is_added_to_a_result_in_place_in_every_call(device, n):
    f, bias = served(doubled, [4], device=device), weights(device)
    for seed in range(4):
        x = randn(n, WIDTH, device=device, seed=seed)
        h = f(x)
        assert not h.requires_grad
        h += bias
        (h * h).sum().backward()
        assert torch.allclose(bias.grad, 2 * (doubled(x) + bias.detach()).sum(0), atol=1e-5), seed
        bias.grad = None


@pytest.mark.parametrize("n", [3, 4])
def test_other_arithmetic_in_place_with_gradients_works_in_every_call(device, n):
    f, w = served(lambda x: (doubled(x), x - 1), [4], device=device), weights(device)
    for seed in range(3):
        x = randn(n, WIDTH, device=device, seed=seed)
        left, right = f(x)
        left.mul_(w)
        right[:, 1:].sub_(w[1:])
        (left.sum() + right.sum()).backward()
        wanted = doubled(x).sum(0)
        wanted[1:] -= n
        assert torch.allclose(w.grad, wanted, atol=1e-5), seed
        w.grad = None


def test_a_result_that_was_made_to_require_gradients_says_nothing_of_the_next(device):
    f = served(doubled, [4], device=device)
    x = randn(4, WIDTH, device=device)
    for _ in range(3):
        h = f(x)
        assert not h.requires_grad
        assert h.grad is None
        h.requires_grad_()
        (h * 3).sum().backward()
        assert same(h.grad, torch.full_like(h, 3))


def replaced(h):
    h.data = torch.zeros(5, 5, device=h.device)


def resized(h):
    h.resize_(2, 2)


def set_elsewhere(h):
    h.set_(torch.zeros(3, device=h.device))


@pytest.mark.parametrize(
    "change",
    [
        replaced,
        resized,
        set_elsewhere,
        lambda h: h.t_(),
        lambda h: h.transpose_(0, 1),
        lambda h: h.unsqueeze_(0),
        lambda h: h.squeeze_(),
        lambda h: h.as_strided_((2, 2), (1, 1)),
    ],
)
@pytest.mark.parametrize("n", [1, 3, 4])
def test_a_change_of_one_result_reaches_no_other(device, change, n):
    f = served(doubled, [4], device=device)
    x = randn(n, WIDTH, device=device)
    earlier = f(x)
    address = earlier.data_ptr()
    for _ in range(3):
        h = f(x)
        assert h.data_ptr() == address
        assert same(h, doubled(x))
        with torch.no_grad():
            change(h)
        shape = h.shape
        assert same(earlier, doubled(x)), "an earlier result is the same memory in its own shape"
        f(x)
        assert h.shape == shape, "a later call leaves the changed one alone"


def modes():
    return pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE])


@modes()
def test_a_result_that_autograd_saved_is_refused_after_the_next_call(device, mode):
    f, w = served(doubled, [2, 4], mode=mode, device=device), weights(device)
    x = randn(4, WIDTH, device=device)
    for n in (4, 3, 1):
        y = (f(x) * w).sum()
        f(randn(n, WIDTH, device=device, seed=n))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
    assert w.grad is None


@modes()
def test_without_a_call_in_between_the_gradient_is_right(device, mode):
    f, w = served(doubled, [2, 4], mode=mode, device=device), weights(device)
    for seed in range(3):
        x = randn(3, WIDTH, device=device, seed=seed)
        (f(x) * w).sum().backward()
        assert torch.allclose(w.grad, doubled(x).sum(0), atol=1e-5)
        w.grad = None


@pytest.mark.parametrize(
    "view", [lambda h: h[1:], lambda h: h.view(-1, 2, WIDTH), lambda h: h.detach(), lambda h: h[:, 0, None]]
)
def test_a_saved_view_of_a_result_is_refused_as_well(device, view):
    f, w = served(doubled, [4], device=device), weights(device)
    x = randn(4, WIDTH, device=device)
    y = (view(f(x)) * w).sum()
    f(randn(4, WIDTH, device=device, seed=1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_every_tensor_of_a_tree_is_refused_on_its_own(device):
    f, w = served(lambda x: {"a": x * 2, "b": (x + 1,)}, [4], device=device), weights(device)
    out = f(randn(4, WIDTH, device=device))
    sums = [(out["a"] * w).sum(), (out["b"][0] * w).sum()]
    f(randn(4, WIDTH, device=device, seed=1))
    for y in sums:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_an_input_that_is_returned_is_overwritten_by_the_next_call_and_autograd_knows(device):
    f, w = served(lambda x: (x, x[:, 1:]), [4], device=device), weights(device)
    whole, part = f(randn(4, WIDTH, device=device))
    sums = [(whole * w).sum(), (part * w[1:]).sum()]
    f(randn(4, WIDTH, device=device, seed=1))
    for y in sums:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_another_wrapper_of_the_same_pool_overwrites_it_and_one_of_another_does_not(device):
    pool = GraphPool(device)
    f = served(doubled, [4], pool=pool, device=device)
    g, apart = served(torch.tanh, [4], pool=pool, device=device), served(torch.tanh, [4], device=device)
    x, w = randn(4, WIDTH, device=device), weights(device)
    for h in (f, g, apart):
        h(x)
    y = (f(x) * w).sum()
    g(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    y = (f(x) * w).sum()
    apart(x)
    y.backward()
    assert torch.allclose(w.grad, doubled(x).sum(0), atol=1e-5)


def test_a_runners_saved_output_is_refused_after_its_next_replay(device):
    runner = make_runner(device, doubled, [2, 4], results="unguarded")
    w = weights(device)
    y = (runner.run({"x": randn(4, WIDTH, device=device)}) * w).sum()
    runner.run({"x": randn(2, WIDTH, device=device, seed=1)})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_strong_outputs_are_refused_after_their_own_graphs_next_replay(device):
    f = served(doubled, [4], options=CaptureOptions(freeze_gc=False, weak_output=False), device=device)
    w = weights(device)
    y = (f(randn(4, WIDTH, device=device)) * w).sum()
    f(randn(4, WIDTH, device=device, seed=1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_what_autograd_saved_of_a_table_that_the_step_returns_stays_good(device):
    table, w = randn(WIDTH, device=device), weights(device)
    f = served(lambda x: (x * 2, table), [4], device=device)
    x = randn(4, WIDTH, device=device)
    f(x)
    y = (table * w).sum()
    for _ in range(2):
        f(x)
    y.backward()
    assert same(w.grad, table)
