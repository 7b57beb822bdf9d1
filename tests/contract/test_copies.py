"""Copies and pickles of wrappers have the same settings and no graphs; graphs stay in their process."""

import copy
import io
import pickle

import pytest
import torch

from contract.steps import WIDTH, make_runner, padded, randn, reasons, same, strictly, wrap
from ostinato.graphs import CaptureError, GraphPool


class Small(torch.nn.Module):
    """Importable, so that it can be pickled."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.scale = 2.0

    def forward(self, x):
        return self.linear(x) * self.scale


def doubled(x):
    return x * 2 + 1


def rows_first(x):
    return x.cumsum(0) * 2


def cannot_be_captured(x):
    return x * x.sum().item()


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled, saved])
USED = pytest.mark.parametrize("used", [False, True])


@COPIES
@USED
def test_the_copy_of_a_wrapped_module_has_no_graphs_and_makes_its_own(device, copied, used):
    model = Small().to(device).eval()
    f = wrap(model)
    x = randn(3, WIDTH, device=device)
    if used:
        f(x)
        f(randn(9, WIDTH, device=device))
    twin = copied(f)
    assert isinstance(twin, Small)
    assert twin is not f
    assert copied is copy.copy or twin.unwrap() is not f.unwrap()
    assert (twin.report().graphs, twin.report().eager_steps) == ((), {})
    with torch.no_grad():
        wanted = model(padded(x, 4))[:3]
    assert same(twin(x), wanted)
    assert (reasons(twin), twin.report().replays) == ({}, 1)
    assert [row.num_tokens for row in twin.report().graphs] == [4, 2]
    assert same(f(x), wanted)
    assert f.report().replays == 1 + used


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_a_deep_copy_has_weights_of_its_own_and_a_shallow_one_shares_them(device, copied):
    f = wrap(Small().to(device).eval())
    x = randn(3, WIDTH, device=device)
    before = f(x).clone()
    twin, shallow = copied(f), copy.copy(f)
    assert same(shallow(x), before)
    with torch.no_grad():
        twin.linear.weight.zero_()
    assert same(f(x), before)
    assert shallow.linear.weight is f.linear.weight
    with torch.no_grad():
        f.linear.weight.mul_(2)
    assert same(f(x), shallow(x).clone())
    assert not same(f(x), before)


@COPIES
@USED
def test_the_copy_of_a_wrapped_function_has_no_graphs_and_makes_its_own(device, copied, used):
    f = wrap(doubled)
    x = randn(3, WIDTH, device=device)
    if used:
        f(x)
    twin = copied(f)
    assert twin is not f
    assert twin.unwrap() is doubled
    assert twin.__name__ == "doubled"
    assert twin.report().graphs == ()
    for n in (3, 1, 4):
        assert same(twin(x[:n]), doubled(x[:n]))
    assert (reasons(twin), twin.report().replays) == ({}, 3)
    assert f.report().replays == used


@COPIES
def test_settings_are_copied(device, copied):
    f = copied(wrap(rows_first, [3, 5], batch_dim=1))
    x = randn(2, 4, WIDTH, device=device)
    assert same(f(x), rows_first(x))
    assert [row.num_tokens for row in f.report().graphs] == [5, 3]
    with pytest.raises(CaptureError):
        copied(wrap(cannot_be_captured, options=strictly()))(randn(2, WIDTH, device=device))
    off = copied(wrap(doubled, mode="none"))
    off(randn(2, WIDTH, device=device))
    assert reasons(off) == {"disabled": 1}


@COPIES
def test_a_pool_that_was_given_is_not_carried_along(device, copied):
    pool = GraphPool(device)
    f = wrap(doubled, pool=pool)
    x = randn(3, WIDTH, device=device)
    f(x)
    assert len(pool.graphs) == 2
    twin = copied(f)
    kept = f(x)
    values = kept.clone()
    twin(randn(4, WIDTH, device=device, seed=1))
    assert len(pool.graphs) == 2
    assert same(kept, values), "the twin has memory of its own"


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_a_wrapper_inside_a_module_is_copied_with_it(device, copied):
    parent = torch.nn.Sequential(wrap(Small().to(device).eval()), torch.nn.Tanh())
    x = randn(3, WIDTH, device=device)
    before = parent(x).clone()
    twin = copied(parent)
    assert isinstance(twin[0], Small)
    assert same(twin(x), before)
    assert (twin[0].report().replays, parent[0].report().replays) == (1, 1)
    assert list(twin.state_dict()) == list(parent.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_wrapper_of_a_wrapper_is_copied_as_both(device, copied):
    inner = wrap(Small().to(device).eval(), mode="piecewise")
    outer = wrap(inner)
    x = randn(3, WIDTH, device=device)
    before = outer(x).clone()
    twin = copied(outer)
    assert same(twin(x), before)
    assert twin.report().replays == 1
    assert type(twin.unwrap()).__name__ == "Small"
    assert isinstance(twin.unwrap().unwrap(), Small)


@pytest.mark.parametrize("capture", [False, True])
def test_a_runner_cannot_be_pickled_and_says_why(device, capture):
    runner = make_runner(device, doubled, [2], capture=capture)
    with pytest.raises(TypeError, match=r"address.*process"):
        pickle.dumps(runner)


def test_a_pool_cannot_be_pickled_and_says_why(device):
    with pytest.raises(TypeError, match=r"address.*process"):
        pickle.dumps(GraphPool(device))
