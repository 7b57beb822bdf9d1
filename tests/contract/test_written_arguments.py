"""Arguments that a function writes in place hold afterwards what they hold without graphs."""

import logging
from dataclasses import dataclass

import pytest
import torch

from contract.steps import WIDTH, close, make_runner, randn, reasons, same, wrap
from ostinato.graphs import ConfigError

LENGTH = 6


def attend(q, cache, positions):
    """A step of decoding over a cache that is passed in: one row for each request."""
    cache[torch.arange(len(q), device=q.device), positions] = q
    seen = torch.arange(LENGTH, device=q.device) <= positions[:, None]
    scores = torch.einsum("nd,ntd->nt", q, cache).masked_fill(~seen, float("-inf"))
    return torch.einsum("nt,ntd->nd", scores.softmax(1), cache)


def twin(function, *args):
    """What the function makes of copies of its arguments, and those."""
    copies = [arg.detach().clone() for arg in args]
    with torch.no_grad():
        return function(*copies), copies


def assert_as_eager(f, function, *args, tolerance=1e-5):
    wanted, copies = twin(function, *args)
    assert close(f(*args), wanted, tolerance)
    assert close(list(args), copies, tolerance)


@pytest.mark.parametrize("mode", ["full", "piecewise"])
@pytest.mark.parametrize("results", ["copied", "guarded"])
def test_a_cache_that_is_passed_in_is_filled(device, mode, results):
    f = wrap(attend, [1, 2, 4], mode=mode, results=results)
    for n in (3, 4, 1, 2):
        cache = torch.zeros(n, LENGTH, WIDTH, device=device)
        for position in range(LENGTH):
            q = randn(n, WIDTH, device=device, seed=position)
            assert_as_eager(f, attend, q, cache, torch.full((n,), position, device=device))
    assert reasons(f) == {}
    f.verify()


def test_a_cache_without_a_batch_is_filled(device):
    def shared(x, table):
        table.mul_(2)
        return x + table.sum()

    f = wrap(shared, shared=["table"])
    table = randn(5, device=device)
    for n in (3, 1, 4):
        assert_as_eager(f, shared, randn(n, WIDTH, device=device), table)
    assert reasons(f) == {}


def test_tensors_in_trees_and_along_other_dimensions_are_written(device):
    @dataclass
    class Cache:
        keys: torch.Tensor
        values: list[torch.Tensor]

    def columns(x, cache):
        cache.keys.add_(x)
        cache.values[1].copy_(x * 2)
        return cache.keys + cache.values[0]

    f = wrap(columns, batch_dim=1)
    for n in (3, 4, 1, 2):
        x = randn(WIDTH, n, device=device)
        given = [randn(WIDTH, n, device=device, seed=seed) for seed in range(3)]
        wanted = [tensor.clone() for tensor in given]
        result = columns(x, Cache(wanted[0], wanted[1:]))
        assert same(f(x, Cache(given[0], given[1:])), result)
        assert same(given, wanted)
    assert reasons(f) == {}


def test_an_argument_that_is_written_and_returned_is_the_callers(device):
    def step(x):
        x.mul_(2)
        return x, x[:, 1:], x + 1

    f = wrap(step)
    for n in (3, 4):
        x = randn(n, WIDTH, device=device)
        given = x.clone()
        whole, part, more = f(x)
        assert same(x, given * 2)
        assert same(more, given * 2 + 1)
        x.zero_()
        assert not whole.any()
        assert not part.any()
    assert reasons(f) == {}


def test_a_view_of_something_larger_is_written_where_it_is(device):
    def step(x, target):
        target.add_(x)
        return target * 2

    f = wrap(step)
    base = randn(6, 2 * WIDTH, device=device)
    wanted = base.clone()
    for n in (3, 2, 4):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(f(x, base[1 : n + 1, ::2]), step(x, wanted[1 : n + 1, ::2]))
        assert same(base, wanted)
    assert reasons(f) == {}


def test_calls_without_graphs_write_the_callers_tensors(device):
    f = wrap(lambda x: x.mul_(2) + 1)
    for n in (7, 3, 7, 3):
        assert_as_eager(f, lambda x: x.mul_(2) + 1, randn(n, WIDTH, device=device, seed=n))
    assert_as_eager(f, lambda x: x.mul_(2) + 1, randn(3, 2, WIDTH, device=device))
    assert reasons(f) == {"larger-than-max": 2, "unseen-signature": 1}


def test_a_function_that_writes_and_cannot_be_captured_writes_the_callers_tensor(device):
    def step(x):
        x.mul_(2)
        return x + x.sum().item()

    f = wrap(step)
    for n in (3, 2):
        assert_as_eager(f, step, randn(n, WIDTH, device=device, seed=n))
    assert reasons(f) == {"capture-failed": 2}


def test_a_first_call_that_makes_state_writes_the_callers_tensor(device):
    class Lazy(torch.nn.Module):
        total = None

        def forward(self, x, cache):
            if self.total is None:
                self.total = torch.zeros(WIDTH, device=x.device)
            self.total.add_(1)
            cache.add_(x)
            return cache, cache * 2 + self.total, self.total

    module, alike = Lazy(), Lazy()
    f = wrap(module)
    cache, wanted = torch.zeros(3, WIDTH, device=device), torch.zeros(3, WIDTH, device=device)
    for seed in range(3):
        x = randn(3, WIDTH, device=device, seed=seed)
        whole, more, total = f(x, cache)
        assert same(more, alike(x, wanted)[1])
        assert same(cache, wanted)
        assert whole.data_ptr() == cache.data_ptr()
        assert total.data_ptr() == module.total.data_ptr()
    assert reasons(f) == {"first-call": 1}


# -- where a copy would not behave like the argument ---------------------------------------------------


def written(left, right):
    left.add_(1)
    return left + right


@pytest.mark.parametrize(
    "views",
    [
        lambda base: (base[:3], base[:3]),
        lambda base: (base[:3], base[1:4]),
        lambda base: (base[:3], base[:3].detach()),
        lambda base: (base[:3], base[:3].clone().set_(base[:3])),
    ],
)
@pytest.mark.parametrize("overlap_first", [False, True])
def test_views_that_overlap_are_run_eagerly_where_one_is_written(device, views, overlap_first):
    f = wrap(written)
    base, wanted = randn(6, WIDTH, device=device), randn(6, WIDTH, device=device)
    if not overlap_first:
        f(base[:3].clone(), base[3:].clone())
    for _ in range(2):
        assert same(f(*views(base)), written(*views(wanted)))
        assert same(base, wanted)
    assert reasons(f) == {"written-argument": 2}


def test_views_that_lie_beside_each_other_are_served(device):
    f = wrap(written)
    base, wanted = randn(6, WIDTH, device=device), randn(6, WIDTH, device=device)
    for _ in range(2):
        assert same(f(base[:3], base[3:]), written(wanted[:3], wanted[3:]))
        assert same(base, wanted)
    assert (reasons(f), f.report().replays) == ({}, 2)


def test_one_tensor_for_two_arguments_is_served_where_none_is_written(device):
    f = wrap(lambda left, right: left * 2 + right)
    z = randn(3, WIDTH, device=device)
    for _ in range(2):
        assert same(f(z, z), z * 2 + z)
    assert (reasons(f), f.report().replays) == ({}, 2)


def test_one_tensor_for_two_arguments_is_served_where_a_third_is_written(device):
    def step(left, right, target):
        target.add_(1)
        return left * 2 + right + target

    f = wrap(step)
    z, target = randn(3, WIDTH, device=device), randn(3, WIDTH, device=device, seed=1)
    for _ in range(2):
        wanted = z * 2 + z + (target + 1)
        assert same(f(z, z, target), wanted)
    assert (reasons(f), f.report().replays) == ({}, 2)


class Remembering(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.ones(4, WIDTH))

    def forward(self, x, cache):
        self.cache.mul_(2)
        return x + cache


class Helped(Remembering):
    def forward(self, x, cache):
        cache.add_(x)
        return x + self.cache[: len(x)]


@pytest.mark.parametrize("kind", [Remembering, Helped])
def test_the_functions_own_tensor_as_an_argument_is_run_eagerly_where_it_is_written(device, kind, caplog):
    module, alike = kind().to(device), kind().to(device)
    f = wrap(module, [4])
    x = randn(4, WIDTH, device=device)
    for _ in range(3):
        assert same(f(x, module.cache), alike(x, alike.cache))
        assert same(module.cache, alike.cache)
    assert reasons(f) == {"written-argument": 3}
    assert "cache" in caplog.text
    apart = torch.ones(4, WIDTH, device=device)
    assert same(f(x, apart), alike(x, torch.ones(4, WIDTH, device=device)))
    assert same(module.cache, alike.cache)
    assert reasons(f) == {"written-argument": 3}


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.unsqueeze_(0),
        lambda x: x.t_(),
        lambda x: x.resize_(2, 2),
        lambda x: x.set_(torch.ones(3, device=x.device)),
        lambda x: setattr(x, "data", x.data * 2),
    ],
)
def test_a_function_that_gives_its_argument_another_shape_or_memory_is_refused_by_name(device, change):
    def step(other, x):
        change(x)
        return other * 2

    f = wrap(step)
    for n in (4, 3):
        other, x = randn(n, WIDTH, device=device), randn(n, WIDTH, device=device)
        wanted = x.clone()
        change(wanted)
        assert same(f(other, x), other * 2)
        assert same(x, wanted)
    assert f.report().replays == 0
    assert all("argument x" in cause for cause in f.report().failures.values())


def test_a_leaf_with_gradients_is_refused_as_without_graphs(device):
    f = wrap(lambda x: x.mul_(2))
    x = randn(3, WIDTH, device=device)
    f(x)
    x.requires_grad_()
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        f(x)
    assert same(x.detach(), before)
    with torch.no_grad():
        f(x)
    assert same(x.detach(), before * 2)


def test_gradients_flow_through_an_argument_that_is_written(device):
    def step(h, x):
        h.mul_(3)
        return x * 2

    f, w = wrap(step), torch.ones(WIDTH, device=device, requires_grad=True)
    x = randn(3, WIDTH, device=device)
    f(x.clone(), x)
    h = x * w
    f(h, x)
    h.sum().backward()
    assert torch.allclose(w.grad, 3 * x.sum(0), atol=1e-5)


def test_elements_that_share_memory_are_refused_as_without_graphs(device):
    f = wrap(lambda x: x.mul_(2))
    f(randn(3, WIDTH, device=device))
    with pytest.raises(RuntimeError, match="single memory location"):
        f(randn(1, WIDTH, device=device).expand(3, -1))


def test_a_tensor_of_inference_mode_is_refused_as_without_graphs(device):
    f = wrap(lambda x: x.mul_(2))
    f(randn(3, WIDTH, device=device))
    with torch.inference_mode():
        x = randn(3, WIDTH, device=device)
        f(x)
    assert same(x, randn(3, WIDTH, device=device) * 2)
    with torch.no_grad(), pytest.raises(RuntimeError, match="nference tensor"):
        f(x)


@dataclass
class State:
    hidden: torch.Tensor


REFILLED = {
    "dictionary": (lambda x: {"h": x * 0}, lambda x, s: s.update(h=s["h"] + x), lambda s: s["h"]),
    "new entry": (lambda x: {"h": x * 0}, lambda x, s: s.setdefault("n", x + 1), lambda s: s.get("n")),
    "list": (lambda x: [x * 0], lambda x, s: s.append(x + 1), lambda s: s[-1]),
    "inner list": (lambda x: {"l": [x]}, lambda x, s: s["l"].insert(0, x * 2), lambda s: s["l"][0]),
    "dataclass": (
        lambda x: State(x * 0),
        lambda x, s: setattr(s, "hidden", s.hidden + x),
        lambda s: s.hidden,
    ),
}


@pytest.mark.parametrize("kind", REFILLED)
def test_a_function_that_refills_its_argument_is_refused_by_name(device, kind):
    make, change, look = REFILLED[kind]

    def step(x, state):
        change(x, state)
        return x * 2

    f = wrap(step)
    x = randn(3, WIDTH, device=device)
    state, wanted = make(x), make(x)
    for _ in range(2):
        assert same(f(x, state), step(x, wanted))
        assert same(look(state), look(wanted))
    assert f.report().replays == 0
    assert all("argument state" in cause for cause in f.report().failures.values())


def test_a_function_that_makes_its_own_lists_is_served(device):
    def step(x, states):
        states = [*states, x]
        copied = dict(enumerate(states))
        copied[0] = copied[0] + 1
        return torch.stack([copied[0], *states], 1)

    f = wrap(step)
    x = randn(3, WIDTH, device=device)
    for _ in range(2):
        assert same(f(x, [x * 2, x * 3]), step(x, [x * 2, x * 3]))
    assert reasons(f) == {}


# -- said, and checked ---------------------------------------------------------------------------------


def test_a_log_line_names_the_argument_and_what_it_costs(device, caplog):
    def step(x, cache):
        cache.add_(x)
        return x * 2

    f = wrap(step)
    with caplog.at_level(logging.INFO, logger="ostinato.graphs"):
        for _ in range(3):
            f(randn(3, WIDTH, device=device), torch.zeros(3, WIDTH, device=device))
    [line] = [r.getMessage() for r in caplog.records if "in place" in r.getMessage()]
    assert "cache" in line
    assert "96 bytes" in line


def test_a_written_argument_that_depends_on_the_batch_is_refused_by_name(device):
    def step(x, cache):
        cache.add_(x.mean(0))
        return x * 2

    f = wrap(step)
    for n in (3, 2):
        assert_as_eager(f, step, randn(n, WIDTH, device=device), torch.zeros(n, WIDTH, device=device))
    [cause] = set(f.report().failures.values())
    assert "cache" in cause


def test_doctor_finds_what_is_wrong_with_a_written_argument(device):
    def step(x, cache):
        cache.add_(x.mean(0))
        return x * 2

    def right(x, cache):
        cache.add_(x)
        return x * 2

    x, cache = randn(3, WIDTH, device=device), torch.zeros(3, WIDTH, device=device)
    assert not wrap(step).doctor(x, cache).is_healthy
    assert wrap(right).doctor(x, cache).is_healthy
    assert not cache.any()


def test_a_runner_copies_back_what_it_is_told_of(device):
    def step(x):
        x.mul_(2)
        return x + 1

    told = make_runner(device, step, [4], written=["x"])
    x = randn(3, WIDTH, device=device)
    given = x.clone()
    assert same(told.run({"x": x}), given * 2 + 1)
    assert same(x, given * 2)
    array = given.cpu().numpy().copy()
    told.run({"x": array})
    assert same(torch.from_numpy(array), given.cpu() * 2)
    with pytest.raises(ConfigError, match="y"):
        make_runner(device, step, [4], written=["y"])
