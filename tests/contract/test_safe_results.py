"""What a call returns is the caller's for good, and shares memory with what it would share memory with."""

import asyncio
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contract.steps import WIDTH, close, make_runner, mlp, randn, reasons, same, wrap
from ostinato.graphs import ConfigError, GraphPool, eager_boundary, graphed


def batches(device, *sizes):
    return [randn(n, WIDTH, device=device, seed=seed) for seed, n in enumerate(sizes)]


@pytest.fixture(params=["full", "piecewise"])
def mode(request):
    return request.param


# -- results last --------------------------------------------------------------------------------------


def test_a_list_of_predictions_keeps_every_one(device, mode):
    model = mlp(device)
    f = wrap(model, [1, 2, 4], mode=mode)
    xs = batches(device, 4, 3, 1, 2, 4, 3)
    with torch.no_grad():
        kept = [f(x) for x in xs]
        for x, y in zip(xs, kept, strict=True):
            assert close(y, model(x))
    assert f.report().replays == len(xs)


def test_two_calls_of_one_expression(device):
    f = wrap(lambda x: torch.tanh(x) * 3)
    x, c = batches(device, 3, 3)
    assert close(f(x) + f(c), torch.tanh(x) * 3 + torch.tanh(c) * 3)
    guided = f(c) + 7.5 * (f(x) - f(c))
    assert close(guided, torch.tanh(c) * 3 + 7.5 * (torch.tanh(x) - torch.tanh(c)) * 3)


def test_results_last_while_others_of_the_pool_replay_and_capture(device):
    pool = GraphPool(device)
    f, g = wrap(lambda x: x * 2, pool=pool), wrap(lambda x: torch.cat([x, x + 1], 1), pool=pool)
    xs = batches(device, 3, 4, 2)
    first, second = f(xs[0]), g(xs[1])
    f(xs[2])
    wrap(lambda x: x - 5, pool=pool)(xs[1])
    assert same(first, xs[0] * 2)
    assert same(second, torch.cat([xs[1], xs[1] + 1], 1))


def test_results_last_across_await(device):
    f = wrap(lambda x: x * 2 + 1)

    async def request(x):
        y = f(x)
        await asyncio.sleep(0)
        return y

    async def requests(xs):
        return await asyncio.gather(*map(request, xs))

    xs = batches(device, *[3, 1, 4, 2] * 4)
    for x, y in zip(xs, asyncio.run(requests(xs)), strict=True):
        assert same(y, x * 2 + 1)


def test_results_made_in_one_thread_are_used_in_another(device):
    f = wrap(lambda x: x * 2 + 1)
    xs = batches(device, *[3, 1, 4, 2] * 4)
    with ThreadPoolExecutor(3) as pool:
        sums = [pool.submit(lambda y: y.double().sum().item(), f(x)) for x in xs]
        made = list(pool.map(f, xs))
    for x, total, y in zip(xs, sums, made, strict=True):
        assert total.result() == pytest.approx((x * 2 + 1).double().sum().item())
        assert same(y, x * 2 + 1)


def test_a_runners_results_last_too(device):
    runner = make_runner(device, lambda x: {"y": x * 2, "sum": x.sum(1)}, [2, 4])
    xs = batches(device, 3, 2, 4)
    outs = [runner.run({"x": x}) for x in xs]
    for x, out in zip(xs, outs, strict=True):
        assert same(out, {"y": x * 2, "sum": x.sum(1)})


def test_what_is_left_in_an_attribute_lasts(device):
    class Kept(torch.nn.Module):
        def forward(self, x):
            self.hidden = x * 2
            return self.hidden + 1

    module = Kept()
    f = wrap(module)
    kept, xs = [], batches(device, 3, 4, 2)
    for x in xs:
        f(x)
        kept.append(module.hidden)
    for x, hidden in zip(xs, kept, strict=True):
        assert same(hidden, x * 2)


def test_what_the_caller_does_to_a_result_reaches_nobody(device):
    f = wrap(lambda x: (x * 2, x + 1))
    x = randn(3, WIDTH, device=device)
    for _ in range(3):
        y, z = f(x)
        assert same(y, x * 2)
        assert same(z, x + 1)
        y.zero_()
        z.resize_(0)


def test_autograd_may_save_a_result(device):
    f, w = wrap(lambda x: x * 2), torch.ones(WIDTH, device=device, requires_grad=True)
    xs = batches(device, 3, 4, 2)
    loss = sum((f(x) * w).sum() for x in xs)
    loss.backward()
    assert torch.allclose(w.grad, sum((x * 2).sum(0) for x in xs), atol=1e-5)


# -- results share what they would share ---------------------------------------------------------------


def test_a_result_and_its_view_change_together(device):
    def step(x):
        y = x * 2
        return {"y": y, "last": y[:, -1], "flat": y.flatten(), "turned": y.t()}

    f = wrap(step)
    for n in (3, 4, 1):
        x = randn(n, WIDTH, device=device)
        out = f(x)
        assert same(out, step(x))
        out["y"].mul_(10)
        assert same(out, {k: v * 10 for k, v in step(x).items()})
        loss = (out["last"] * torch.ones((), device=device, requires_grad=True)).sum()
        out["y"].add_(1)
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()


def test_views_of_other_types_change_together(device):
    def step(x):
        y = torch.complex(x, x * 2)
        return y, torch.view_as_real(y), y.conj(), y.imag

    f = wrap(step)
    x = randn(3, WIDTH, device=device)
    out = f(x)
    assert same(out, step(x))
    out[1].mul_(2)
    assert same(out, [leaf * 2 for leaf in step(x)])


def test_parts_of_one_tensor_are_all_right(device):
    f = wrap(lambda x: (x * 3).chunk(4, dim=1))
    x, other = batches(device, 3, 3)
    parts = f(x)
    f(other)
    assert same(parts, (x * 3).chunk(4, dim=1))
    parts[0].zero_()
    assert same(parts[1:], (x * 3).chunk(4, dim=1)[1:])


def test_a_small_view_does_not_keep_a_large_tensor(device):
    f = wrap(lambda x: x[:, None].repeat(1, 100, 1)[:, -1])
    x = randn(3, WIDTH, device=device)
    y = f(x)
    assert same(y, x)
    assert y.untyped_storage().nbytes() == x.nbytes


def test_what_expand_repeats_is_not_copied_out(device):
    f = wrap(lambda x: (x * 2)[:, None].expand(-1, 1000, -1))
    x = randn(3, WIDTH, device=device)
    y = f(x)
    assert same(y, (x * 2)[:, None].expand(-1, 1000, -1))
    assert y.untyped_storage().nbytes() == x.nbytes


def test_an_argument_that_is_returned_is_the_callers(device):
    f = wrap(lambda x, y: {"x": x, "part": x[:, 2:], "y": y + 1})
    for n in (3, 4):
        x, y = batches(device, n, n)
        out = f(x, y)
        assert out["x"].data_ptr() == x.data_ptr()
        x.mul_(2)
        assert same(out, {"x": x, "part": x[:, 2:], "y": y + 1})


def test_an_argument_laid_out_otherwise_that_is_returned_is_right(device):
    f = wrap(lambda x: (x, x[:, 2:]))
    x = randn(WIDTH, 3, device=device).t()
    whole, part = f(x)
    other = f(randn(3, WIDTH, device=device, seed=1))
    assert same((whole, part), (x, x[:, 2:]))
    assert not same(other[0], whole)


def test_state_that_is_returned_is_the_state(device):
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.scale = torch.nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            self.count.add_(1)
            return x * self.scale, self.count, self.scale

    module = Counting().to(device)
    f = wrap(module)
    x = randn(3, WIDTH, device=device)
    with torch.no_grad():
        outs = [f(x) for _ in range(3)]
    assert [out[1].item() for out in outs] == [3, 3, 3]
    assert outs[0][2].data_ptr() == module.scale.data_ptr()


# -- any program ---------------------------------------------------------------------------------------

_VIEWS = [
    lambda t: t,
    lambda t: t[:, 1:3],
    lambda t: t[:, ::2],
    lambda t: t.t(),
    lambda t: t[:, 0],
    lambda t: t[:, None].expand(-1, 3, -1),
    lambda t: t.view(-1, 2, WIDTH // 2),
    lambda t: t.detach(),
    lambda t: t.view(torch.int32),
    lambda t: t.unfold(1, 3, 1),
]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, len(_VIEWS) - 1)), min_size=1, max_size=5))
def test_any_views_of_anything_behave_as_without_graphs(device, chosen):
    table = randn(4, WIDTH, device=device, seed=9)

    def step(x):
        sources = [x * 2, x, table[:2] * 1]
        return [_VIEWS[view](sources[source]) for source, view in chosen if source < 2]

    if not any(source < 2 for source, _ in chosen):
        return
    f = wrap(step, [4])
    for n in (3, 4):
        x, eager_x = randn(n, WIDTH, device=device), randn(n, WIDTH, device=device)
        outs, wanted = f(x), step(eager_x)
        f(randn(4, WIDTH, device=device, seed=5))
        assert same(outs, wanted)
        for out, want in zip(outs, wanted, strict=True):
            if out.stride() == want.stride() and 0 not in want.stride() and want.dim() == 2:
                out.mul_(3)
                want.mul_(3)
            assert same(outs, wanted)
            assert same(x, eager_x)


# -- by name -------------------------------------------------------------------------------------------


def test_only_known_kinds_of_results_are_taken(device):
    with pytest.raises(ConfigError, match="copied, guarded, unguarded"):
        make_runner(device, lambda x: x, [2], results="fast")
    with pytest.raises(ConfigError, match="copied or guarded"):
        graphed(lambda x: x, ladder=[2], results="unguarded")


def test_guarded_results_may_be_fed_on(device):
    f = wrap(lambda x: x * 2 + 1, results="guarded")
    x = randn(3, WIDTH, device=device)
    y = f(f(x))
    assert same(y.clone(), (x * 2 + 1) * 2 + 1)


def test_results_of_eager_parts_last_too(device):
    attend = eager_boundary(lambda x: x + 1)
    f = wrap(lambda x: (attend(x * 2), attend(x) * 3), mode="piecewise")
    xs = batches(device, 3, 4)
    outs = [f(x) for x in xs]
    for x, out in zip(xs, outs, strict=True):
        assert same(out, (x * 2 + 1, (x + 1) * 3))
    assert reasons(f) == {}


# -- containers ----------------------------------------------------------------------------------------


@dataclass
class Counted(OrderedDict):
    """Its constructor does more than to put values in their places."""

    logits: torch.Tensor
    others: tuple | None = None

    def __post_init__(self):
        self["logits"], self.rows = self.logits, len(self.logits)


@dataclass
class Kept(OrderedDict):
    """Holds the same as entry and as attribute, as the outputs of transformers do."""

    logits: torch.Tensor
    others: tuple | None = None
    loss: torch.Tensor | None = None

    def __post_init__(self):
        self["logits"], self["others"] = self.logits, self.others


Pair = namedtuple("Pair", ["first", "second"])

KEYS = [torch.utils._pytree.MappingKey(name) for name in ("logits", "others")]
for kind in (Counted, Kept):
    torch.utils._pytree.register_pytree_node(
        kind,
        lambda made: ([made.logits, made.others], None),
        lambda leaves, _, kind=kind: kind(*leaves),
        flatten_with_keys_fn=lambda made: (list(zip(KEYS, [made.logits, made.others], strict=True)), None),
    )


def seen(value):
    """All that can be seen of a result, without the identities of tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    entries = list(value.items()) if isinstance(value, dict) else list(enumerate(value or ()))
    attributes = list(getattr(value, "__dict__", {}).items())
    numbers = [entry for entry in attributes if isinstance(entry[1], int)]
    others = [(key, inner) for key, inner in (*entries, *attributes) if not isinstance(inner, int)]
    return type(value), numbers, [(key, seen(inner)) for key, inner in others]


@pytest.mark.parametrize(
    "made",
    [
        lambda x: Counted(x * 2, (x + 1, None)),
        lambda x: Kept(x * 2, (x + 1, [x])),
        lambda x: {"b": Kept(x * 2), "a": Pair(x + 1, ())},
        lambda x: Pair(OrderedDict(b=x * 2, a=None), [[x + 1]]),
    ],
    ids=["counted", "kept", "nested", "plain"],
)
@pytest.mark.parametrize("results", ["copied", "guarded"])
def test_containers_are_those_that_the_function_returns_at_every_size(device, made, results):
    f = wrap(made, [2, 4], results=results)
    before = []
    for rows in (4, 3, 3, 2, 1, 4):
        x = randn(rows, WIDTH, device=device, seed=rows)
        result = f(x)
        assert seen(result) == seen(made(x)), rows
        if isinstance(result, Kept):
            assert result["logits"] is result.logits
            assert result["others"] is result.others
        assert not any(result is other for other in before)
        before.append(result)
    assert not f.report().eager_steps


def test_what_is_one_object_without_graphs_is_one_object(device):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(WIDTH))

        def forward(self, x, h):
            h.add_(x)
            y = x * self.weight
            return y, {"same": y}, h, self.weight

    f = graphed(Model().to(device), ladder=[1, 2, 4])
    with torch.no_grad():
        for rows in (3, 4, 1):
            x, h = randn(rows, WIDTH, device=device), torch.zeros(rows, WIDTH, device=device)
            y, again, state, weight = f(x, h)
            assert (y is again["same"], state is h, weight is f.weight) == (True, True, True)
            assert same(h, x)
    assert f.graph_call.report().replays == 3


@pytest.mark.parametrize("first", [5, 1])
def test_what_is_an_argument_or_another_result_only_at_some_sizes_is_what_it_is_at_each(device, first):
    own = torch.ones(WIDTH, device=device)

    def step(x, h):
        y = x + h
        return (x * 2, y, y * 3, own * 4) if len(x) <= 2 else (x, y, y, own)

    f = graphed(step, ladder=[1, 2, 6])
    with torch.no_grad():
        for rows in (first, 1, 3, 2, 6, 1):
            x, h = randn(rows, WIDTH, device=device), randn(rows, WIDTH, device=device, seed=1)
            assert same(f(x, h), step(x, h))
    assert not f.report().eager_steps
