"""Results as the caller would get them without graphs: no padding in any dimension, or no graph at all."""

import enum
import time
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from contract.steps import WIDTH, close, make_runner, mlp, randn, reasons, same, strictly, wrap
from ostinato.graphs import CaptureError, CaptureOptions, VerifyError

Counted = namedtuple("Counted", ["rows", "count"])
LADDERS = pytest.mark.parametrize("ladder", [[4], [2, 4], [1, 2, 3, 5]])


@dataclass
class Plain:
    h: Any
    extra: Any = None


@dataclass(frozen=True)
class Frozen:
    h: Any
    scale: float = 1.0


@dataclass(slots=True)
class Slotted:
    h: Any
    inner: Any = None


@dataclass(frozen=True, slots=True)
class Sealed:
    h: Any
    inner: Any = None


@dataclass
class Derived:
    h: Any
    rows: Any = field(init=False)

    def __post_init__(self):
        self.rows = self.h.sum(1)


class Kind(enum.Enum):
    ONE = "one"


# -- rows in every dimension ---------------------------------------------------------------------------


@pytest.mark.parametrize("ladder", [[4], [2, 4], [2, 3, 4]])
def test_an_lstm_returns_its_states_for_real_rows_only(device, ladder):
    torch.manual_seed(0)
    model = torch.nn.LSTM(WIDTH, 6, num_layers=2, batch_first=True).to(device).eval()
    f = wrap(model, ladder)
    for n in (3, 1, 2, 4):
        x = randn(n, 3, WIDTH, device=device, seed=n)
        out, (h, c) = f(x)
        with torch.no_grad():
            wanted, (wanted_h, wanted_c) = model(x)
        assert (out.shape, h.shape, c.shape) == ((n, 3, 6), (2, n, 6), (2, n, 6))
        assert close((out, h, c), (wanted, wanted_h, wanted_c), 1e-4)
    assert set(reasons(f)) <= {"first-call"}, "cuDNN keeps what it made in the first call"
    assert f.report().replays >= 3


@LADDERS
def test_a_matrix_of_rows_against_rows_is_cut_in_both_dimensions(device, ladder):
    f = wrap(lambda x: x @ x.T, ladder)
    for n in (3, 1, 2):
        x = randn(n, WIDTH, device=device, seed=n)
        out = f(x)
        assert out.shape == (n, n)
        assert close(out, x @ x.T)
    assert reasons(f) == {}


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.t(),
        lambda x: x[None],
        lambda x: x[:, None] - x[None],
        lambda x: torch.stack([x, x + 1]),
        lambda x: x.t()[:, None] * 2,
    ],
)
@pytest.mark.parametrize("ladder", [[WIDTH], [2, WIDTH]])
def test_rows_may_be_along_any_dimension_even_beside_one_as_wide_as_a_rung(device, step, ladder):
    f = wrap(step, ladder)
    for n in (3, 1, 2):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(f(x), step(x))
    assert reasons(f) == {}


def test_rows_in_another_dimension_are_cut_where_the_batch_is_along_dimension_one(device):
    f = wrap(lambda x: (x.transpose(0, 1), x.sum((0, 2)), x * 2), [2, 4], batch_dim=1)
    for n in (3, 1):
        x = randn(2, n, WIDTH, device=device, seed=n)
        assert close(f(x), (x.transpose(0, 1), x.sum((0, 2)), x * 2))
    assert reasons(f) == {}


# -- dataclasses ---------------------------------------------------------------------------------------


SEVERAL_EACH = {
    "repeat_interleave": lambda x: {"beams": x.repeat_interleave(3, 0), "x": x + 1},
    "view": lambda x: (x * 2).view(-1, WIDTH // 4),
    "another dimension": lambda x: x.t().repeat_interleave(2, 1) + 1,
}


@LADDERS
@pytest.mark.parametrize("name", SEVERAL_EACH)
def test_several_rows_for_each_row_of_the_batch_are_cut(device, name, ladder):
    f = wrap(SEVERAL_EACH[name], ladder)
    for n in (3, 1, 4, 2):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(f(x), SEVERAL_EACH[name](x))
    assert (reasons(f), f.report().replays) == ({}, 4)


@LADDERS
@pytest.mark.parametrize("function", [lambda x: x.repeat(2, 1), lambda x: torch.cat([x, -x])])
def test_several_rows_in_another_order_are_refused_with_what_to_do(device, function, ladder):
    f = wrap(function, ladder)
    for n in (3, 1, 4, 2):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(f(x), function(x))
    assert reasons(f) == {"capture-failed": 4}
    assert all("return [rows, k, ...]" in cause for cause in f.report().failures.values())


def test_several_rows_in_an_order_that_nothing_shows_are_refused(device):
    """A step that only supports the sizes of the ladder cannot be compared without padding."""

    def step(x):
        if len(x) % 4:
            raise ValueError(len(x))
        return x.repeat(2, 1)

    f = wrap(step, [4, 8])
    assert same(f(randn(4, WIDTH, device=device)), step(randn(4, WIDTH, device=device)))
    assert reasons(f) == {"capture-failed": 1}


@pytest.mark.parametrize("kind", [Plain, Frozen, Slotted, Sealed])
def test_a_dataclass_comes_in_and_goes_out_as_what_it_is(device, kind):
    def step(given):
        assert type(given) is kind
        return kind(given.h * 2)

    f = wrap(step)
    for n in (3, 1, 4, 2):
        x = randn(n, WIDTH, device=device, seed=n)
        given = kind(x)
        out = f(given)
        assert type(out) is kind
        assert same(out.h, x * 2)
        assert given.h is x
    assert reasons(f) == {}
    assert f.report().replays == 4
    x = randn(7, WIDTH, device=device)
    assert same(f(kind(x)).h, x * 2)
    assert reasons(f) == {"larger-than-max": 1}


def test_dataclasses_nest_in_each_other_and_in_other_trees(device):
    def step(given, *, more):
        total = given.h + given.inner.h * given.inner.scale + more["a"][0].h
        return {"out": Slotted(total, Frozen(total * 2, 4.0)), "rest": [Plain(total + 1, (total - 1, None))]}

    f = wrap(step)
    for n in (3, 1, 4):
        x, y, z = (randn(n, WIDTH, device=device, seed=n + i) for i in range(3))
        out = f(Sealed(x, Frozen(y, 3.0)), more={"a": [Plain(z)]})
        total = x + y * 3.0 + z
        assert (type(out["out"]), type(out["out"].inner), type(out["rest"][0])) == (Slotted, Frozen, Plain)
        assert out["out"].inner.scale == 4.0
        assert out["rest"][0].extra[1] is None
        tensors = [out["out"].h, out["out"].inner.h, out["rest"][0].h, out["rest"][0].extra[0]]
        assert same(tensors, [total, total * 2, total + 1, total - 1])
    assert reasons(f) == {}


def test_fields_that_the_constructor_does_not_take_are_there(device):
    f = wrap(lambda given: Derived(given.h + given.rows[:, None]))
    for n in (3, 2):
        given = Derived(randn(n, WIDTH, device=device, seed=n))
        out = f(given)
        wanted = given.h + given.rows[:, None]
        assert type(out) is Derived
        assert close((out.h, out.rows), (wanted, wanted.sum(1)))
    assert reasons(f) == {}


def test_a_dataclass_of_shared_tables_has_no_batch(device):
    f = wrap(lambda x, tables: x * tables.h + tables.extra, shared=["tables"])
    for seed in range(2):
        x = randn(3, WIDTH, device=device, seed=seed)
        tables = Plain(randn(WIDTH, device=device, seed=5 + seed), randn(1, WIDTH, device=device, seed=9))
        assert same(f(x, tables), x * tables.h + tables.extra)
    assert reasons(f) == {}


def test_a_constant_field_of_another_value_is_another_signature(device):
    f = wrap(lambda given: given.h * given.scale)
    x = randn(2, WIDTH, device=device)
    assert same(f(Frozen(x, 2.0)), x * 2)
    assert same(f(Frozen(x, 3.0)), x * 3)
    assert same(f(Frozen(x, 2.0)), x * 2)
    assert (reasons(f), f.report().replays) == ({"unseen-signature": 1}, 2)


def test_dataclasses_are_not_registered_for_everyone_else(device):
    f = wrap(lambda given: Plain(given.h * 2))
    given = Plain(randn(2, WIDTH, device=device))
    out = f(given)
    assert tree_leaves(given) == [given]
    assert tree_leaves(out) == [out]


# -- results that no graph can give --------------------------------------------------------------------


def refused(f, name, *, calls, rungs=2):
    """Every rung was given up for an output of this name, and each call was counted."""
    report = f.report()
    assert report.graphs == ()
    assert len(report.failures) == rungs
    assert all("CaptureError" in cause and name in cause for cause in report.failures.values()), (
        report.failures
    )
    # What a first call leaves alive in an opaque result cannot be told from state that the function keeps.
    assert set(reasons(f)) <= {"capture-failed", "first-call"}
    assert sum(reasons(f).values()) == calls
    return True


@dataclass
class Summary:
    h: Any
    count: Any


CHANGING = {
    "len": (lambda x: (x * 2, len(x)), "output[1]"),
    "share": (lambda x: (x * 2, {"share": 1 / len(x)}), "output[1]['share']"),
    "text": (lambda x: {"y": x * 2, "text": f"{len(x)} rows"}, "output['text']"),
    "shape": (lambda x: [x * 2, x.shape], "output[1]"),
    "unbind": (lambda x: (x * 2, x.unbind(0)), "output[1]"),
    "unbind in a dict": (lambda x: {"y": x, "rows": list(x.unbind(0))}, "output['rows']"),
    "dataclass": (lambda x: Summary(x * 2, len(x)), "output.count"),
    "named tuple": (lambda x: Counted(x * 2, len(x)), "output.count"),
    "is it long": (lambda x: (x * 2, len(x) > 3), "output[1]"),
    "sometimes none": (lambda x: (x * 2, None if len(x) < 4 else 1), "output[1]"),
}


def leaves_of(value):
    """Leaves of results of this file, dataclasses included."""
    return tree_leaves(vars(value) if isinstance(value, Plain | Summary | SimpleNamespace) else value)


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("ladder", [[4], [2, 4]])
def test_a_result_that_follows_the_batch_outside_of_tensors_is_refused_by_name(device, name, ladder):
    step, path = CHANGING[name]
    f = wrap(step, ladder)
    for n in (3, 2):
        x = randn(n, WIDTH, device=device, seed=n)
        out = f(x)
        assert type(out) is type(step(x))
        assert same(leaves_of(out), leaves_of(step(x)))
    assert refused(f, path, calls=2, rungs=len(ladder))


@pytest.mark.parametrize("step", [lambda x: x.unbind(0), len, lambda x: 1 / len(x)])
def test_a_bare_result_is_called_output(device, step):
    f = wrap(step)
    x = randn(3, WIDTH, device=device)
    assert same(f(x), step(x))
    assert refused(f, "output", calls=1)


def test_an_object_that_is_new_at_every_call_is_refused_by_name(device):
    f = wrap(lambda x: (x * 2, SimpleNamespace(h=x + 1)))
    for n in (3, 4):
        x = randn(n, WIDTH, device=device, seed=n)
        y, holder = f(x)
        assert same([y, holder.h], [x * 2, x + 1])
    assert refused(f, "output[1]", calls=2)
    assert "is a SimpleNamespace that every call creates anew" in str(f.report().failures)


def test_a_bare_object_that_is_new_at_every_call_keeps_its_own_tensors(device):
    f = wrap(lambda x: SimpleNamespace(h=x * 2))
    x = randn(3, WIDTH, device=device)
    first, second = f(x), f(x + 1)
    assert first is not second
    assert same([first.h, second.h], [x * 2, (x + 1) * 2])
    assert refused(f, "output", calls=2)


@pytest.mark.parametrize("name", ["len", "unbind", "dataclass"])
def test_strict_raises_it(device, name):
    step, path = CHANGING[name]
    with pytest.raises(CaptureError) as caught:
        wrap(step, options=strictly())(randn(3, WIDTH, device=device))
    assert path in str(caught.value)


def test_strict_raises_for_a_new_object_as_well(device):
    f = wrap(lambda x: {"h": SimpleNamespace(h=x)}, options=strictly())
    with pytest.raises(CaptureError) as caught:
        f.capture(randn(3, WIDTH, device=device))
    assert "output['h']" in str(caught.value)


def test_a_runner_refuses_a_number_that_follows_the_batch_by_name(device):
    def step(x):
        return x * 2, x.size(0)

    runner = make_runner(device, step, [2, 4], capture=False)
    runner.capture(progress=False)
    assert runner.graphs == {}
    assert all("output[1]" in cause for cause in runner.report().failures.values())
    assert len(runner.report().failures) == 2
    x = randn(3, WIDTH, device=device)
    assert same(runner.run({"x": x}), (x * 2, 3))
    assert reasons(runner) == {"capture-failed": 1}
    with pytest.raises(CaptureError) as caught:
        make_runner(device, step, [2, 4], options=strictly())
    assert "output[1]" in str(caught.value)


def test_an_object_that_is_always_the_same_is_a_constant(device):
    config = SimpleNamespace(scale=2)
    f = wrap(lambda x: {"y": x * config.scale, "config": config})
    for n in (3, 1, 4):
        x = randn(n, WIDTH, device=device, seed=n)
        out = f(x)
        assert out["config"] is config
        assert same(out["y"], x * 2)
    assert (reasons(f), f.report().replays) == ({}, 3)


def test_equal_constants_may_be_made_anew_in_every_call(device):
    def step(x):
        return (
            x * 2,
            "".join(["a", "b"]),
            2.5 * 3,
            10**30,
            (None, True),
            x.dtype,
            x.device,
            x.shape[1:],
            Kind.ONE,
        )

    f = wrap(step)
    x = randn(3, WIDTH, device=device)
    for _ in range(2):
        out, wanted = f(x), step(x)
        assert same(out[0], wanted[0])
        assert out[1:] == wanted[1:]
    assert (reasons(f), f.report().replays) == ({}, 2)


def test_a_constant_that_is_not_a_number_is_one_all_the_same(device):
    f = wrap(lambda x: (x * 2, float("nan")))
    for _ in range(2):
        value = f(randn(3, WIDTH, device=device))[1]
        assert value != value
    assert (reasons(f), f.report().replays) == ({}, 2)


# -- values that depend on the batch -------------------------------------------------------------------


def mean_taken_off(x):
    return x - x.mean(0)


DEPENDENT = {
    "divided by the number of rows": lambda x: x / len(x),
    "without the mean": mean_taken_off,
    "softmax over the batch": lambda x: x.softmax(0),
    "normed over the batch": lambda x: x / x.norm(dim=0).add(1).mul(len(x)),
    "multiplied with the size": lambda x: x * x.size(0),
    "upside down": lambda x: x.flip(0),
    "the neighbour's": lambda x: x.roll(1, 0),
}


@pytest.mark.parametrize("name", DEPENDENT)
@pytest.mark.parametrize("ladder", [[4], [2, 4]])
def test_rows_that_depend_on_the_batch_are_refused_by_name(device, name, ladder):
    step = DEPENDENT[name]
    f = wrap(lambda x: {"fine": x + 1, "mixed": step(x)}, ladder)
    for n in (3, 1, 2):
        x = randn(n, WIDTH, device=device, seed=n)
        assert close(f(x), {"fine": x + 1, "mixed": step(x)}, 1e-4)
    report = f.report()
    assert report.graphs == ()
    for cause in report.failures.values():
        assert "output['mixed'] depends on the batch" in cause
        assert "fine" not in cause
    assert reasons(f) == {"capture-failed": 3}


def test_a_bare_output_that_depends_on_the_batch_is_called_output(device):
    f = wrap(mean_taken_off)
    x = randn(3, WIDTH, device=device)
    assert close(f(x), mean_taken_off(x), 1e-4)
    assert all("output depends on the batch" in cause for cause in f.report().failures.values())
    assert reasons(f) == {"capture-failed": 1}


def test_strict_raises_for_rows_that_depend_on_the_batch(device):
    f = wrap(lambda x: x / len(x), options=strictly())
    with pytest.raises(CaptureError, match="output depends on the batch"):
        f(randn(3, WIDTH, device=device))


def test_a_batch_norm_in_training_is_refused_and_its_statistics_are_those_of_eager(device):
    model, twin = (torch.nn.BatchNorm1d(WIDTH, device=device).train() for _ in range(2))
    f = wrap(model)
    for n in (3, 4, 2):
        x = randn(n, WIDTH, device=device, seed=n) * 3 + 1
        with torch.no_grad():
            assert close(f(x), twin(x), 1e-4)
    assert close(model.running_mean, twin.running_mean)
    assert close(model.running_var, twin.running_var)
    assert model.num_batches_tracked.item() == 3
    assert f.report().graphs == ()
    assert reasons(f) == {"capture-failed": 3}


def test_a_batch_norm_in_eval_mode_is_served(device):
    model = torch.nn.BatchNorm1d(WIDTH, device=device)
    with torch.no_grad():
        model(randn(9, WIDTH, device=device) * 2 + 1)
    f = wrap(model.eval())
    x = randn(3, WIDTH, device=device)
    with torch.no_grad():
        assert close(f(x), model(x))
    assert f.report().replays == 1
    assert f.verify().passed


@pytest.mark.parametrize("ladder", [[4], [2, 4]])
def test_a_sum_over_rows_of_zeros_is_right_and_is_served(device, ladder):
    f = wrap(lambda x: x + x.sum(0), ladder)
    for n in (3, 1, 2):
        x = randn(n, WIDTH, device=device, seed=n)
        assert close(f(x), x + x.sum(0))
    assert (reasons(f), f.report().replays) == ({}, 3)


def test_rows_that_depend_on_earlier_rows_only_are_right_and_are_served(device):
    f = wrap(lambda x: (x.cumsum(0), x.sum(), x[:1] * 2))
    for n in (3, 1, 2):
        x = randn(n, WIDTH, device=device, seed=n)
        assert close(f(x), (x.cumsum(0), x.sum(), x[:1] * 2))
    assert (reasons(f), f.report().replays) == ({}, 3)


def test_padding_that_leaves_a_maximum_alone_is_right_and_is_served(device):
    f = wrap(lambda x: x - x.amax(0), pads={"x": float("-inf")})
    for n in (3, 1, 2):
        x = randn(n, WIDTH, device=device, seed=n)
        assert close(f(x), x - x.amax(0))
    assert (reasons(f), f.report().replays) == ({}, 3)


def test_dropout_is_not_mistaken_for_rows_that_depend_on_the_batch(device):
    f = wrap(lambda x: torch.nn.functional.dropout(x, 0.5), [4])
    x = randn(3, WIDTH, device=device)
    for _ in range(4):
        out = f(x).clone()
        assert bool(((out == 0) | (out == x * 2)).all())
    assert (reasons(f), f.report().replays) == ({}, 4)


class NormThenDropout(torch.nn.Module):
    """A model that somebody left in training mode."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return torch.nn.functional.dropout(self.norm(x), 0.5)


RANDOM_AND_DEPENDENT = {
    "batch norm and dropout": NormThenDropout,
    "softmax over rows and a draw": lambda: lambda x: (x.softmax(0), torch.rand(2, device=x.device)),
    "last row and noise": lambda: lambda x: x - x[-1] + torch.randn(WIDTH, device=x.device),
}


@pytest.mark.parametrize("name", RANDOM_AND_DEPENDENT)
def test_random_numbers_hide_no_dependence_on_the_batch(device, name):
    function = RANDOM_AND_DEPENDENT[name]()
    if isinstance(function, torch.nn.Module):
        function = function.to(device).train()
    f = wrap(function, [2, 4], options=strictly())
    with pytest.raises(CaptureError, match="depends on the batch"), torch.no_grad():
        f(randn(3, WIDTH, device=device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_of_16_bits_is_no_dependence_even_if_it_ends_in_32(device, dtype):
    """As by a library that multiplies few rows in another order than many."""

    def step(x):
        low = x.to(dtype)
        return (low * (1 + 2**-7) if len(x) > 2 else low).float()

    f = wrap(step, [2, 4], options=strictly())
    x = randn(3, WIDTH, device=device)
    with (
        nullcontext()
        if dtype is torch.bfloat16
        else pytest.raises(CaptureError, match="depends on the batch")
    ):
        assert torch.allclose(f(x), step(x), rtol=0.02)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x - x.mean(0),
        lambda x: x.sort(0)[0],
        lambda x: x - x[-1],
        lambda x: x.argmax(0),
    ],
)
def test_a_first_call_with_zeros_hides_no_dependence_on_the_batch(device, step):
    f = wrap(step, [2, 4], options=strictly())
    with pytest.raises(CaptureError, match="depends on the batch"):
        f(torch.zeros(3, WIDTH, device=device))


SIZES_DECIDE = {
    "a number": ([2, 4, 8], lambda x: x * (2 if len(x) > 3 else 3)),
    "an op": ([2, 4, 8], lambda x: x.sin() if len(x) > 3 else x.cos()),
    "between rungs": ([1, 2, 4, 16], lambda x: x.sin() if len(x) > 6 else x.cos()),
    "a dimension of one row": ([4, 8], lambda x: x.sin().squeeze()),
}


@pytest.mark.parametrize("name", SIZES_DECIDE)
def test_python_that_asks_for_the_size_of_the_batch_is_refused(device, name):
    ladder, step = SIZES_DECIDE[name]
    f = wrap(step, ladder)
    for n in (4, 3, 1, 6, 7):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(f(x), step(x))
    assert reasons(f) == {"capture-failed": 5}
    assert all("depends on the batch" in cause for cause in f.report().failures.values())


class Seen(torch.nn.Module):
    """Counts or adds up the rows that it has seen."""

    def __init__(self, way, start=0):
        super().__init__()
        self.way = way
        self.register_buffer("total", torch.full((3,), start, dtype=torch.float32))
        self.register_buffer("count", torch.full((), start))
        self.register_buffer("codes", torch.eye(3, WIDTH))

    def forward(self, x):
        if self.way == "rows":
            self.count += len(x)
        elif self.way == "sum":
            self.total.mul_(0.9).add_((x[:, :3] + 1).sum(0))
        elif self.way == "usage":
            nearest = torch.cdist(x, self.codes).argmin(1)
            self.total += torch.nn.functional.one_hot(nearest, 3).sum(0)
        elif self.way == "calls":
            self.count += 1
            self.total.mul_(0.9).add_(1)
        return x + 1


@pytest.mark.parametrize("start", [0, 100_000])
@pytest.mark.parametrize("way", ["rows", "sum", "usage", "calls"])
def test_state_that_counts_padded_rows_is_refused(device, way, start):
    module, plain = Seen(way, start).to(device), Seen(way, start).to(device)
    f = wrap(module, [2, 4, 8])
    for seed, n in enumerate((4, 3, 8, 1, 5)):
        x = randn(n, WIDTH, device=device, seed=seed)
        assert same(f(x), plain(x))
        assert close(module.total, plain.total)
        assert same(module.count, plain.count)
    assert reasons(f) == ({} if way == "calls" else {"capture-failed": 5})


@torch.library.custom_op("ostinato_tests::note_time", mutates_args=("at",))
def note_time(at: torch.Tensor, x: torch.Tensor) -> None:
    at.fill_(time.perf_counter_ns())


def test_a_time_that_a_step_leaves_says_nothing_of_the_batch(device):
    """Two runs of the same leave others."""
    if device.type == "cuda":
        pytest.skip("the host's clock; kernels that note the device's are in test_plain_sampling")
    at, total = torch.zeros(3, dtype=torch.int64, device=device), torch.zeros(2, device=device)

    def step(x):
        note_time(at[:2], x)
        total.add_(1)
        return x + 1

    f = wrap(step, [2, 4, 8], options=strictly())
    for n in (3, 5, 1):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(f(x), x + 1)
    assert (reasons(f), f.report().replays, total.tolist()) == ({}, 3, [3, 3])

    def counting(x):
        note_time(at[:2], x)
        total.add_(len(x))
        return x + 1

    with pytest.raises(CaptureError, match=r"float32\[2\] depends on the batch"):
        wrap(counting, [2, 4, 8], options=strictly())(x)


def test_a_cache_whose_padded_rows_have_a_place_of_their_own_is_served(device):
    """What only padded rows write is nobody's business."""
    cache = torch.zeros(9, WIDTH, device=device)

    def step(x, slot):
        cache[slot] = x
        return cache[slot] + 1

    f = wrap(step, [2, 4, 8], pads={"slot": 8})
    for n in (3, 5, 1):
        f(randn(n, WIDTH, device=device, seed=n), torch.arange(n, device=device))
    assert (reasons(f), f.report().replays) == ({}, 3)


def test_sizes_may_decide_how_the_same_is_computed(device):
    f = wrap(lambda x: x + x if len(x) > 3 else x * 2, [2, 4, 8])
    for n in (4, 3, 1, 6):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(f(x), 2 * x)
    assert (reasons(f), f.report().replays) == ({}, 4)


def test_a_model_is_served_in_full_and_nothing_is_held_against_it(device):
    f = wrap(mlp(device), [1, 2, 3, 5])
    for n in (1, 2, 3, 4, 5):
        f(randn(n, WIDTH, device=device, seed=n))
    assert (reasons(f), f.report().replays, f.report().failures) == ({}, 5, {})


SMALL = {
    "a hundredth of the mean": lambda x: x + 1e-2 * x.mean(0),
    "a thousandth of the size": lambda x: x * (1 + 1e-3 * len(x)),
    "the mean alone": lambda x: x.mean(),
    "a little noise of the others": lambda x: x + 3e-3 * x.softmax(0),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("ladder", [[4], [2, 4]])
def test_a_small_dependence_is_refused_or_found_by_verify_but_never_passed_over(device, name, ladder):
    f = wrap(lambda x: {"fine": x + 1, "mixed": SMALL[name](x)}, ladder)
    f(randn(3, WIDTH, device=device))
    if f.report().graphs:
        with pytest.raises(VerifyError) as caught:
            f.verify()
        message = str(caught.value)
    else:
        message = str(f.report().failures)
    assert "output['mixed']" in message
    assert "depends on the batch" in message


def test_verify_compares_a_runners_rows_with_an_unpadded_step(device):
    runner = make_runner(device, lambda x: (x + 1, x / x.size(0)), [2, 4])
    with pytest.raises(VerifyError) as caught:
        runner.verify()
    assert "output[1]" in str(caught.value)
    assert "depends on the batch" in str(caught.value)
    assert "output[0]" not in str(caught.value)


def test_verify_says_how_far_rows_are_from_an_unpadded_step(device):
    f = wrap(mlp(device), [1, 2, 4])
    f(randn(3, WIDTH, device=device))
    outcome = f.verify()
    assert outcome.passed
    assert len(outcome.checks) >= 3
    assert all(0 <= check.unpadded_error <= 1e-5 for check in outcome.checks)
    assert any("unpadded" in str(column.header) for column in outcome.table().columns)


def test_verify_is_no_call_and_leaves_state_alone_where_it_runs_without_padding(device):
    total = torch.zeros(WIDTH, device=device)

    def step(x):
        total.add_(1)
        return x * 2

    f = wrap(step, options=CaptureOptions(freeze_gc=False))
    f(randn(3, WIDTH, device=device))
    f.verify()
    assert total.tolist() == [1.0] * WIDTH
    assert f.report().replays == 1
