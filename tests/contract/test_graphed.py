"""`graphed` on functions: any pytree in and out, decisions per call, and what stays as it was."""

from collections import namedtuple

import pytest
import torch

from contract.steps import WIDTH, CallCounter, is_recording, mlp, padded, randn, same
from ostinato.graphs import (
    BatchError,
    CaptureError,
    CaptureOptions,
    ConfigError,
    GraphPool,
    Ladder,
    VerifyError,
    eager_boundary,
    graphed,
    step_mode,
)

Pair = namedtuple("Pair", ["left", "right"])


def doubled(x):
    """Twice x."""
    return x * 2 + 1


def reasons(f):
    return dict(f.report().eager_steps)


def test_every_size_up_to_the_limit_equals_eager_at_the_padded_shape(device):
    model, ladder = mlp(device), Ladder([1, 2, 4, 8, 13])
    step = CallCounter(model)
    f = graphed(step, ladder=ladder)
    f(randn(5, WIDTH, device=device))
    calls = step.calls
    with torch.no_grad():
        for n in [*range(1, 14), *range(13, 0, -1), 7, 7]:
            x = randn(n, WIDTH, device=device, seed=n)
            out = f(x)
            assert out.shape == (n, WIDTH)
            assert same(out, model(padded(x, ladder.round_up(n)))[:n]), n
    assert step.calls == calls
    assert reasons(f) == {}
    assert f.report().replays == 1 + 26 + 2


def test_above_the_limit_it_runs_eagerly_with_the_reason(device):
    f = graphed(doubled, ladder=[2, 4])
    f(randn(2, WIDTH, device=device))
    x = randn(5, WIDTH, device=device)
    assert same(f(x), doubled(x))
    assert reasons(f) == {"larger-than-max": 1}


def test_a_first_call_above_the_limit_captures_and_runs_eagerly(device):
    f = graphed(doubled, ladder=[2, 4])
    x = randn(9, WIDTH, device=device)
    assert same(f(x), doubled(x))
    assert same(f(x[:3]), doubled(x[:3]))
    assert (reasons(f), f.report().replays) == ({"larger-than-max": 1}, 1)


def test_pytrees_in_and_out(device):
    def step(pair, named, nested, nothing, flag, text, *, scale):
        assert nothing is None
        assert text == "text"
        total = pair[0] + pair[1] + named["a"] + nested[0]["deep"][0] * scale
        return {"total": total, "rest": [pair[0] * 2, (None, named["b"] + 1)], "flag": flag, "three": 3}

    f = graphed(step, ladder=[2, 4])
    for n in (3, 1, 4, 2):
        tensors = [randn(n, WIDTH, device=device, seed=i) for i in range(4)]
        ids = torch.arange(n, device=device)
        args = (
            (tensors[0], tensors[1]),
            {"a": tensors[2], "b": ids},
            [{"deep": (tensors[3],)}],
            None,
            True,
            "text",
        )
        assert same(f(*args, scale=2.5), step(*args, scale=2.5))
    out = f(*args, scale=2.5)
    assert out["rest"][1][0] is None
    assert (out["flag"], out["three"]) == (True, 3)
    assert reasons(f) == {}


def test_a_named_tuple_comes_back_as_one(device):
    f = graphed(lambda pair: Pair(pair.left + 1, pair.right * 2), ladder=[4])
    given = Pair(randn(3, WIDTH, device=device), randn(3, 2, device=device))
    out = f(given)
    assert type(out) is Pair
    assert same(out, Pair(given.left + 1, given.right * 2))


def test_constants_are_part_of_the_signature(device):
    step = CallCounter(lambda x, power: x**power)
    f = graphed(step, ladder=[2])
    x = randn(2, WIDTH, device=device).abs()
    assert same(f(x, 2), x**2)
    assert same(f(x, 3), x**3), "another constant must not be served by the first one's graph"
    assert same(f(x, 2.0), x**2.0)
    assert same(f(x, True), x**True)
    assert reasons(f) == {"unseen-signature": 3}
    f.capture(x, 3)
    calls = step.calls
    assert same(f(x, 3), x**3)
    assert same(f(x, 2), x**2)
    assert step.calls == calls


def test_keyword_arguments_may_come_in_any_order(device):
    f = graphed(lambda x, *, a, b: x + a * 2 + b * 3, ladder=[4])
    x, a, b = (randn(3, WIDTH, device=device, seed=i) for i in range(3))
    wanted = x + a * 2 + b * 3
    assert same(f(x, a=a, b=b), wanted)
    assert same(f(x, b=b, a=a), wanted)


def test_the_batch_may_be_along_dimension_one(device):
    def step(x):
        return x.cumsum(0), x.sum(2)

    f = graphed(step, ladder=[2, 4], batch_dim=1)
    for n in (3, 1, 2, 4):
        x = randn(3, n, WIDTH, device=device, seed=n)
        out = f(x)
        assert same(out, step(x))
        assert out[0].shape == (3, n, WIDTH)
    assert reasons(f) == {}
    assert f.verify().passed


def test_shared_arguments_have_no_batch_and_may_change_from_call_to_call(device):
    f = graphed(lambda x, table: x @ table, ladder=[4, WIDTH], shared=["table"])
    for seed in range(3):
        x, table = (
            randn(3, WIDTH, device=device, seed=seed),
            randn(WIDTH, WIDTH, device=device, seed=9 + seed),
        )
        assert same(f(x, table), (padded(x, 4) @ table)[:3])
    assert reasons(f) == {}


def test_a_shared_argument_may_be_a_tree(device):
    f = graphed(lambda x, tables: x * tables["a"] + tables["b"], ladder=[4], shared=["tables"])
    tables = {"a": randn(WIDTH, device=device), "b": randn(1, WIDTH, device=device)}
    x = randn(3, WIDTH, device=device)
    assert same(f(x, tables), x * tables["a"] + tables["b"])


def test_a_scalar_tensor_is_an_input_like_any_other(device):
    f = graphed(lambda x, temperature: x / temperature, ladder=[4])
    x = randn(3, WIDTH, device=device)
    for value in (1.0, 0.5, 2.0):
        temperature = torch.tensor(value, device=device)
        assert same(f(x, temperature), x / temperature)
    assert reasons(f) == {}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int16])
def test_numbers_of_few_bits_are_served(device, dtype):
    def step(x):
        return x, x.float() * 2

    f = graphed(step, ladder=[2, 4])
    for n in (3, 1, 4):
        x = (torch.arange(n * WIDTH, device=device) % 8).view(n, WIDTH).to(dtype)
        got = f(x)
        assert same([got[0].float(), got[1]], [x.float(), x.float() * 2])
    assert f.report().replays == 3
    assert f.verify().passed


def test_pads_decide_what_padded_rows_hold(device):
    held = torch.zeros(4, dtype=torch.int64, device=device)

    def step(x, lengths):
        held.copy_(lengths)
        return x / lengths[:, None]

    f = graphed(step, ladder=[4], pads={"lengths": 1})
    for n in (4, 2):
        x, lengths = randn(n, WIDTH, device=device), torch.full((n,), 5, device=device)
        assert same(f(x, lengths), x / lengths[:, None])
    assert held.tolist() == [5, 5, 1, 1]


@pytest.mark.parametrize("setting", [{"shared": ["nope"]}, {"pads": {"nope": 1}}])
def test_a_name_that_is_no_argument_is_refused(device, setting):
    f = graphed(doubled, ladder=[2], **setting)
    with pytest.raises(ConfigError, match=r"nope.*x"):
        f(randn(2, WIDTH, device=device))


def test_several_signatures_are_served_side_by_side(device):
    step = CallCounter(doubled)
    f = graphed(step, ladder=[2, 4])
    flat, deep = randn(3, WIDTH, device=device), randn(3, 5, WIDTH, device=device)
    ids = torch.arange(3, device=device)
    for x in (flat, deep, ids):
        f.capture(x)
    calls = step.calls
    for x in (flat, ids, deep, flat[:1], deep[:2]):
        assert same(f(x), doubled(x))
    assert step.calls == calls
    assert len(f.report().graphs) == 6
    f.capture(flat)
    assert len(f.report().graphs) == 6, "the same signature twice"


def test_an_unseen_signature_runs_eagerly_with_the_reason(device):
    f = graphed(lambda x, *more, **named: x * 2, ladder=[4])
    x = randn(2, WIDTH, device=device)
    f(x)
    others = [
        ((x.double(),), {}),
        ((x[:, :4],), {}),
        ((x[None],), {}),
        ((x, x), {}),
        ((x,), {"y": x}),
        ((x, None), {}),
    ]
    for args, kwargs in others:
        assert same(f(*args, **kwargs), args[0] * 2)
    assert reasons(f) == {"unseen-signature": len(others)}
    assert f.report().replays == 1


DIFFERENT = {
    "got x of float64[8] a row, but x of float32[8] a row was captured": lambda x: ((x.double(), 1.0), {}),
    "got x of float32[4] a row, but": lambda x: ((x[:, :4], 1.0), {}),
    "got 2.0, but 1.0 was captured": lambda x: ((x, 2.0), {}),
    "a different structure": lambda x: ((x,), {"scale": 1.0}),
    "no tensor argument has a batch dimension": lambda x: ((3.0, 1.0), {}),
}


@pytest.mark.parametrize("told", DIFFERENT)
def test_what_makes_a_call_run_eagerly_is_said_once(device, told, caplog):
    f = graphed(lambda x, scale: x * scale, ladder=[4])
    x = randn(2, WIDTH, device=device)
    f(x, 1.0)
    args, kwargs = DIFFERENT[told](x)
    for _ in range(2):
        f(*args, **kwargs)
    assert [told in line for line in caplog.messages] == [True]


def test_arguments_that_disagree_about_the_batch_are_refused(device):
    f = graphed(lambda x, y: x + y.sum(0), ladder=[4])
    x = randn(2, WIDTH, device=device)
    f(x, x)
    with pytest.raises(BatchError, match="shared="):
        f(x, randn(3, WIDTH, device=device))
    assert same(f(x, x), x + padded(x, 4).sum(0))


def test_the_examples_of_the_first_call_are_not_kept_alive_or_changed(device):
    f = graphed(doubled, ladder=[4])
    x = randn(3, WIDTH, device=device)
    f(x)
    x.zero_()
    assert same(f(x), doubled(x))


@pytest.mark.parametrize("first", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("later", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_it_works_under_every_gradient_mode_and_leaves_no_history(device, first, later, is_frozen):
    f = graphed(mlp(device).requires_grad_(not is_frozen), ladder=[2, 4])
    x = randn(3, WIDTH, device=device)
    with torch.no_grad():
        wanted = f.unwrap()(padded(x, 4))[:3]
    for context in (first, later):
        with context():
            out = f(x)
            assert same(out, wanted)
            for result in (out, f(randn(5, WIDTH, device=device))):
                # As without graphs; but backward raises.
                assert result.requires_grad == (torch.is_grad_enabled() and not is_frozen)
    assert f.report().replays == 2


@pytest.mark.parametrize("change", ["unfreeze", "add"])
def test_a_backbone_in_eval_mode_that_would_be_trained_is_refused_and_gets_no_silent_none(device, change):
    model, head = mlp(device).requires_grad_(False), torch.nn.Linear(WIDTH, 2).to(device)
    f, x = graphed(model, ladder=[4]), randn(3, WIDTH, device=device)
    head(f(x)).sum().backward()  # a linear probe
    assert head.weight.grad is not None
    if change == "unfreeze":
        model[2].requires_grad_(True)
    else:
        model.append(torch.nn.Linear(WIDTH, WIDTH).to(device))
        f.recapture()
    with pytest.raises(
        ConfigError, match=r"carry no gradients.*make_graphed_callables.*requires_grad_\(False\)"
    ):
        head(f(x)).sum().backward()
    with torch.no_grad():
        features = f(x)
    head(features).sum().backward()


def test_an_input_that_requires_gradients_is_served_too(device):
    f = graphed(mlp(device), ladder=[4])
    x = randn(4, WIDTH, device=device).requires_grad_()
    for _ in range(2):
        assert same(f(x), f(x.detach()))
        with torch.no_grad():
            assert not f(x).requires_grad
    assert f.report().replays == 6


def test_training_through_it_names_the_calls_to_use(device):
    model = mlp(device).train()
    f = graphed(model, ladder=[4])
    for rows in (4, 3, 5):
        with pytest.raises(ConfigError, match=r"graphed_train_step.*make_graphed_callables"):
            f(randn(rows, WIDTH, device=device)).sum().backward()
    with torch.no_grad():
        assert not f(randn(4, WIDTH, device=device)).requires_grad


def test_inputs_made_in_inference_mode_are_served_outside_of_it(device):
    with torch.inference_mode():
        x = randn(3, WIDTH, device=device) * 1
    f = graphed(doubled, ladder=[4])
    assert same(f(x), doubled(x))
    assert same(f(x.clone()), doubled(x))


def test_state_advances_exactly_once_per_call_also_across_the_capturing_one(device):
    counter = torch.zeros((), dtype=torch.int64, device=device)

    def step(x):
        counter.add_(1)
        return x + counter

    f = graphed(step, ladder=[2, 4])
    x = randn(3, WIDTH, device=device)
    for call, n in enumerate((3, 1, 3, 5, 2), start=1):
        assert same(f(randn(n, WIDTH, device=device)), randn(n, WIDTH, device=device) + call), call
        assert counter.item() == call
    f.capture(x)
    f.recapture()
    f.verify()
    assert counter.item() == 5


def test_non_contiguous_inputs_are_served(device):
    f = graphed(doubled, ladder=[4])
    x = randn(WIDTH, 3, device=device).t()
    assert same(f(x), doubled(x))
    assert same(f(randn(6, WIDTH, device=device)[::2]), doubled(randn(6, WIDTH, device=device)[::2]))


def test_a_function_looks_like_itself(device):
    doubled.marker = "here"
    f = graphed(doubled, ladder=[4])
    assert (f.__name__, f.__doc__, f.__wrapped__) == ("doubled", "Twice x.", doubled)
    assert f.marker == "here"
    assert f.unwrap() is doubled
    with pytest.raises(AttributeError, match="nope"):
        f.nope  # noqa: B018


def test_a_bound_method_and_a_lambda_and_a_builtin_can_be_wrapped(device):
    class Scaler:
        scale = 3

        def apply(self, x):
            return x * self.scale

    x = randn(3, WIDTH, device=device)
    assert same(graphed(Scaler().apply, ladder=[4])(x), x * 3)
    assert same(graphed(torch.relu, ladder=[4])(x), torch.relu(x))


def test_the_result_may_be_a_constant_or_fixed_in_size(device):
    table = randn(3, device=device)
    f = graphed(lambda x: (x.sum(1), table * 2, 7, None), ladder=[2, 4])
    for n in (1, 2, 3):
        x = randn(n, WIDTH, device=device, seed=n)
        assert same(f(x), (x.sum(1), table * 2, 7, None))


def test_a_feature_dimension_as_wide_as_a_rung_is_not_mistaken_for_the_batch(device):
    table = randn(4, device=device)
    f = graphed(lambda x: (x * 2, table + 1), ladder=[2, 4])
    for n in (3, 1):
        out = f(randn(n, WIDTH, device=device))
        assert out[1].shape == (4,)


def test_a_failing_rung_is_served_by_the_next_one_or_eagerly(device):
    def step(x):
        if is_recording() and x.size(0) == 4:
            raise ValueError("no kernel for four")
        return x * 2

    f = graphed(step, ladder=[2, 4])
    x = randn(3, WIDTH, device=device)
    assert same(f(x), x * 2)
    assert reasons(f) == {"capture-failed": 1}
    assert "no kernel for four" in str(f.report())


def test_strict_raises_and_a_later_call_tries_again(device):
    armed = [True]

    def step(x):
        if armed:
            raise ValueError("not yet")
        return x * 2

    f = graphed(step, ladder=[2], options=CaptureOptions(strict=True))
    x = randn(2, WIDTH, device=device)
    with pytest.raises(ValueError, match="not yet"):
        f(x)
    armed.clear()
    assert same(f(x), x * 2)
    assert f.report().replays == 1


def test_wrappers_may_share_a_pool(device):
    pool = GraphPool(device)
    f, g = graphed(doubled, ladder=[4], pool=pool), graphed(lambda x: x - 1, ladder=[4], pool=pool)
    x = randn(4, WIDTH, device=device)
    for _ in range(3):
        assert same(g(f(x)), doubled(x) - 1)
    assert len(pool.graphs) == 2


def test_a_result_may_be_fed_back(device):
    f = graphed(doubled, ladder=[4])
    x = randn(3, WIDTH, device=device)
    wanted, got = x, x
    for _ in range(5):
        wanted, got = doubled(wanted), f(got)
    assert same(got, wanted)


@pytest.mark.parametrize("mode", ["full", "piecewise"])
def test_marked_functions_are_called_at_replay_only_in_piecewise_mode(device, mode):
    inside = CallCounter(lambda h: h * 2)
    marked = eager_boundary(inside)
    f = graphed(lambda x: marked(x + 1) + 1, ladder=[2, 4], mode=mode)
    x = randn(3, WIDTH, device=device)
    f(x)
    inside.calls = 0
    assert same(f(x), (x + 1) * 2 + 1)
    assert inside.calls == (mode == "piecewise")
    assert f.verify().passed


def test_mode_none_runs_eagerly_because_it_is_disabled(device):
    step = CallCounter(doubled)
    f = graphed(step, ladder=[4], mode="none")
    x = randn(3, WIDTH, device=device)
    for _ in range(2):
        assert same(f(x), doubled(x))
    assert step.calls == 2
    assert f.graph_call.eager_steps == {"disabled": 2}
    assert dict(f.report().eager_steps) == {"disabled": 2}


class Nest:
    """A FULL wrapper outside, a PIECEWISE one inside, and counters in each part."""

    def __init__(self, ladder):
        self.boundary, self.inner, self.outer = (
            CallCounter(f) for f in (self._attend, self._inner, self._outer)
        )
        self.marked = eager_boundary(self.boundary)
        self.piecewise = graphed(self.inner, ladder=ladder, mode="piecewise")
        self.full = graphed(self.outer, ladder=ladder, mode="full")

    def _attend(self, h):
        return h * 2

    def _inner(self, x):
        return self.marked(x + 1) + 1

    def _outer(self, x):
        return self.piecewise(x * 3) * 3

    def counts(self):
        counts = (self.outer.calls, self.inner.calls, self.boundary.calls)
        self.outer.calls = self.inner.calls = self.boundary.calls = 0
        return counts


def test_the_mode_of_the_step_decides_which_nested_wrapper_acts(device):
    nest = Nest([4])
    x = randn(4, WIDTH, device=device)
    wanted = ((x * 3 + 1) * 2 + 1) * 3
    for mode in ("full", "piecewise", "none"):
        with step_mode(mode):
            assert same(nest.full(x), wanted)
    nest.counts()
    with step_mode("full"):
        assert same(nest.full(x), wanted)
        assert nest.counts() == (0, 0, 0), "all of it is one graph"
    with step_mode("piecewise"):
        assert same(nest.full(x), wanted)
        assert nest.counts() == (1, 0, 1), "the outer one stands aside, the inner one replays its segments"
    with step_mode("none"):
        assert same(nest.full(x), wanted)
        assert nest.counts() == (1, 1, 1), "all of it is eager"
    assert same(nest.full(x), wanted)
    assert nest.counts() == (0, 0, 0), "without a decision the outermost acts"


def test_what_is_too_large_for_the_outer_wrapper_may_still_run_piecewise_inside(device):
    nest = Nest([4])
    nest.full = graphed(nest.outer, ladder=[2])
    x = randn(4, WIDTH, device=device)
    nest.full(x[:2])
    nest.full(x)
    nest.counts()
    assert same(nest.full(x), ((x * 3 + 1) * 2 + 1) * 3)
    assert nest.counts() == (1, 0, 1)
    assert reasons(nest.full) == {"larger-than-max": 2}


def test_step_mode_is_as_before_after_an_exception(device):
    nest = Nest([4])
    x = randn(4, WIDTH, device=device)
    nest.full(x)
    nest.counts()
    with pytest.raises(ZeroDivisionError), step_mode("none"):
        raise ZeroDivisionError
    nest.full(x)
    assert nest.counts() == (0, 0, 0)


def test_before_the_first_call_the_report_is_empty_and_there_is_nothing_to_verify(device):
    f = graphed(doubled, ladder=[4])
    report = f.report()
    assert (report.graphs, report.replays, dict(report.eager_steps)) == ((), 0, {})
    assert "0 graphs" in str(report)
    with pytest.raises(VerifyError, match="nothing"):
        f.verify()


def test_report_and_verify_cover_every_rung(device):
    f = graphed(mlp(device), ladder=[1, 2, 4])
    f(randn(3, WIDTH, device=device))
    report = f.report()
    assert [row.num_tokens for row in report.graphs] == [4, 2, 1]
    assert all(row.nodes > 0 and row.capture_ms > 0 for row in report.graphs if row.nodes is not None)
    assert report.graphs[0].padding_waste == 0.25
    outcome = f.verify()
    assert len(outcome.max_error) == 3
    assert max(outcome.max_error.values()) <= 1e-6
    assert f.report().replays == 1, "verification is not service"


def test_verify_finds_a_graph_that_no_longer_agrees_with_the_function(device, tmp_path):
    """For a reason that no call notices: it is outside of Python."""
    scale = tmp_path / "scale"
    scale.write_text("2")
    f = graphed(lambda x: x * float(scale.read_text()), ladder=[2, 4])
    f(randn(2, WIDTH, device=device))
    scale.write_text("3")
    with pytest.raises(VerifyError, match="decode 4x1"):
        f.verify()


def test_nothing_is_verified_while_python_values_are_others(device):
    scale = [2.0]
    f = graphed(lambda x: x * scale[0], ladder=[2, 4])
    f(randn(2, WIDTH, device=device))
    scale[0] = 3.0
    with pytest.raises(VerifyError, match="attribute-changed"):
        f.verify()
    f.recapture()
    f.verify()


def test_a_call_without_any_batched_tensor_is_refused(device):
    f = graphed(lambda x: x, ladder=[2])
    for argument in (3, "text", torch.tensor(1.0, device=device), None):
        with pytest.raises(BatchError, match="batch"):
            f(argument)
    x = randn(2, WIDTH, device=device)
    assert same(f(x), x)


def test_a_step_that_cannot_be_captured_is_named_when_strict(device):
    f = graphed(lambda x: x * x.sum().item(), ladder=[2], options=CaptureOptions(strict=True))
    with pytest.raises(CaptureError, match="test_graphed"):
        f(randn(2, WIDTH, device=device))


def test_results_that_are_inputs_may_change_places_in_the_next_call(device):
    f = graphed(lambda a, b: (a, b), ladder=[4])
    a, b = randn(3, WIDTH, device=device), randn(3, WIDTH, device=device, seed=1)
    left, right = f(a, b)
    assert same(f(right, left), (b, a))
