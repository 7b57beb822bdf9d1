"""Piecewise capture: segments from graphs, marked functions called anew between them."""

import pytest
import torch

from contract.steps import WIDTH, CallCounter, eager_padded, key, make_runner, mlp, randn, same
from ostinato.graphs import CaptureError, CaptureOptions, GraphMode, eager_boundary

PIECEWISE, FULL = GraphMode.PIECEWISE, GraphMode.FULL


def counted(function):
    """A boundary around a function that counts its calls."""
    counter = CallCounter(function)
    counter.__qualname__ = counter.__name__ = function.__name__
    return eager_boundary(counter), counter


def segmented(device, step, sizes=(2, 4), **settings):
    return make_runner(device, step, list(sizes), mode=PIECEWISE, **settings)


def agrees(runner, device, sizes=(4, 1, 3, 2, 4)):
    """Replays of changing size equal the eager step at the same padded shape."""
    for seed, n in enumerate(sizes):
        batch = {"x": randn(n, WIDTH, device=device, seed=seed)}
        wanted = eager_padded(runner, batch)
        assert same(runner.run(batch), wanted[:n]), (seed, n)
    return True


@pytest.mark.parametrize("boundaries", [0, 1, 2, 7])
def test_any_number_of_boundaries_may_interrupt_a_step(device, boundaries):
    attend, counter = counted(lambda h: torch.tanh(h) + 1)
    layers = [mlp(device) for _ in range(boundaries + 1)]

    def step(x):
        h = layers[0](x)
        for layer in layers[1:]:
            h = h + layer(attend(h))
        return h

    runner = segmented(device, step)
    assert {row.segments for row in runner.report().graphs} == {boundaries + 1}
    assert runner.graphs[key(4, PIECEWISE)].recorded.graph.boundaries == boundaries
    assert agrees(runner, device)
    counter.calls = 0
    runner.run({"x": randn(3, WIDTH, device=device)})
    assert counter.calls == boundaries, "a boundary is called once per replay"


def test_python_runs_in_the_boundary_and_nowhere_else(device):
    attend, boundary = counted(lambda h: h * 2)
    step = CallCounter(lambda x: attend(x + 1) + 1)
    runner = segmented(device, step)
    step.calls = boundary.calls = 0
    for n in (1, 2, 3, 4):
        runner.run({"x": randn(n, WIDTH, device=device)})
    assert (step.calls, boundary.calls) == (0, 4)


def test_a_full_graph_records_through_the_boundary(device):
    attend, boundary = counted(lambda h: h * 2)
    runner = make_runner(device, lambda x: attend(x + 1) + 1, [4], mode=FULL)
    assert runner.report().graphs[0].segments == 1
    boundary.calls = 0
    x = randn(4, WIDTH, device=device)
    assert same(runner.run({"x": x}), (x + 1) * 2 + 1)
    assert boundary.calls == 0


def test_a_step_may_begin_and_end_with_a_boundary(device):
    attend, counter = counted(lambda h: h * 3)
    runner = segmented(device, lambda x: attend(attend(x)))
    counter.calls = 0
    x = randn(4, WIDTH, device=device)
    assert same(runner.run({"x": x}), x * 3 * 3)
    assert counter.calls == 2


def test_a_nested_boundary_is_part_of_the_outer_ones_eager_call(device):
    inner, inner_counter = counted(lambda h: h + 1)
    outer, outer_counter = counted(lambda h: inner(h) * 2)
    runner = segmented(device, lambda x: outer(x - 1) - 1)
    assert {row.segments for row in runner.report().graphs} == {2}
    inner_counter.calls = outer_counter.calls = 0
    x = randn(4, WIDTH, device=device)
    assert same(runner.run({"x": x}), (x - 1 + 1) * 2 - 1)
    assert (inner_counter.calls, outer_counter.calls) == (1, 1)


def test_a_boundary_may_write_in_place_into_its_argument(device):
    @eager_boundary
    def attend(q, out):
        out.copy_(q * 2)

    def step(x):
        out = torch.empty_like(x)
        attend(x + 1, out)
        return out + x

    assert agrees(segmented(device, step), device)


def test_a_boundary_may_return_its_argument_written_in_place(device):
    @eager_boundary
    def attend(h, residual):
        return h.mul_(2), residual

    def step(x):
        h, residual = attend(x + 1, x * 5)
        return h + residual

    assert agrees(segmented(device, step), device)


def test_a_boundary_may_return_a_tuple_a_dict_or_nothing(device):
    @eager_boundary
    def pair(h):
        return h * 2, None, h + 1

    @eager_boundary
    def named(a, *, b):
        return {"sum": a + b, "rest": [a, (b * 2,)]}

    seen = []

    @eager_boundary
    def nothing(h):
        seen.append(h.size(0))

    def step(x):
        doubled, none, more = pair(x)
        assert none is None
        found = named(doubled, b=more)
        assert nothing(found["sum"]) is None
        return found["sum"] + found["rest"][0] + found["rest"][1][0]

    runner = segmented(device, step)
    assert agrees(runner, device)
    seen.clear()
    runner.run({"x": randn(1, WIDTH, device=device)})
    assert seen == [2]


@pytest.mark.parametrize("value", [3, "text", 2.5, True], ids=repr)
def test_a_python_value_from_a_boundary_is_refused_by_name(device, value):
    @eager_boundary
    def sizes(h):
        return h * 2, value

    runner = segmented(device, lambda x: sizes(x)[0], capture=False, options=CaptureOptions(strict=True))
    with pytest.raises(CaptureError, match=f"sizes.*{type(value).__name__}"):
        runner.capture(progress=False)
    assert agrees(segmented(device, lambda x: x * 2), device)


def test_python_arguments_of_a_boundary_are_given_again_at_replay(device):
    @eager_boundary
    def attend(h, layer, *, scale, mask=None):
        return h * scale + layer

    assert agrees(segmented(device, lambda x: attend(attend(x, 1, scale=2.0), 2, scale=3.0)), device)


def test_a_tensor_from_before_a_boundary_may_be_used_behind_it(device):
    attend, _ = counted(lambda h: torch.sin(h))

    def step(x):
        residual = x * 3
        early = residual.relu() + 1
        h = attend(residual + 1)
        h = attend(h + residual)
        return h + residual + early

    assert agrees(segmented(device, step), device)


def test_a_later_segment_does_not_write_over_what_a_boundary_is_about_to_read(device):
    attend, _ = counted(lambda q, k: q + k)

    def step(x):
        k = x + 1
        q = x * 2
        for _ in range(3):
            q = attend(q, k) * 0.5
            k = (k + q).tanh()
        return q + k

    assert agrees(segmented(device, step), device)


@pytest.mark.parametrize("weak_output", [True, False])
def test_bridges_hold_across_rungs_big_small_big(device, weak_output):
    attend, _ = counted(lambda h: (h * 2, h + 1))

    def step(x):
        held = []
        h = x
        for _ in range(3):
            a, b = attend(h)
            held.append(b)  # bridges of earlier boundaries stay in use
            h = a + b
        return h + held[0] + held[1] * 2 + held[2] * 3

    runner = segmented(device, step, [1, 2, 8, 16], options=CaptureOptions(weak_output=weak_output))
    assert agrees(runner, device, [16, 1, 16, 2, 7, 16, 1, 1, 16])


def test_a_boundarys_result_may_be_the_output_of_the_step(device):
    attend, _ = counted(lambda h: h * 2)
    runner = segmented(device, lambda x: (attend(x + 1), attend(x - 1)))
    x = randn(4, WIDTH, device=device)
    assert same(runner.run({"x": x}), ((x + 1) * 2, (x - 1) * 2))


def test_results_with_other_strides_cross_a_boundary_as_they_are(device):
    @eager_boundary
    def turned(h):
        return h.t().contiguous().t(), h.clone()[:, ::2], h.new_zeros(h.size(0), 0)

    def step(x):
        a, b, empty = turned(x)
        assert a.stride() == (1, a.size(0))
        return a + b.sum(1, keepdim=True) + empty.size(1)

    assert agrees(segmented(device, step), device)


def test_an_exception_in_a_boundary_while_capturing_leaves_everything_clean(device):
    armed = [True]

    @eager_boundary
    def attend(h):
        if armed:
            raise ValueError("attention broke")
        return h * 2

    options = CaptureOptions(strict=True, warmups=0)
    runner = segmented(device, lambda x: attend(x + 1) + 1, capture=False, options=options)
    with pytest.raises(ValueError, match="attention broke"):
        runner.capture(progress=False)
    armed.clear()
    x = randn(4, WIDTH, device=device)
    assert same(attend(x), x * 2), "outside a capture a marked function is a plain function"
    torch.rand(3, device=device)
    runner.capture(progress=False)
    assert agrees(runner, device)


def test_an_exception_in_a_boundary_while_replaying_leaves_everything_clean(device):
    armed = []

    @eager_boundary
    def attend(h):
        if armed:
            raise ValueError("attention broke")
        return h * 2

    runner = segmented(device, lambda x: attend(x + 1) + 1)
    armed.append(True)
    with pytest.raises(ValueError, match="attention broke"):
        runner.run({"x": randn(4, WIDTH, device=device)})
    armed.clear()
    assert agrees(runner, device)
    assert agrees(segmented(device, lambda x: attend(x) - 1), device)


def test_outside_a_capture_a_marked_function_is_a_plain_function(device):
    @eager_boundary
    def attend(h, flag):
        """Attention."""
        return h if flag else "any value at all"

    x = randn(2, WIDTH, device=device)
    assert attend(x, True) is x
    assert attend(x, False) == "any value at all"
    assert (attend.__name__, attend.__doc__) == ("attend", "Attention.")


def test_a_boundary_may_do_what_a_recording_must_not(device):
    read = []

    @eager_boundary
    def peek(h):
        read.append(h.sum().item())
        return h[h[:, 0] > 0].sum(0, keepdim=True).expand_as(h).clone()

    runner = segmented(device, lambda x: peek(x * 2) + x, [4])
    read.clear()
    x = randn(4, WIDTH, device=device)
    wanted = eager_padded(runner, {"x": x})
    read.clear()
    assert same(runner.run({"x": x}), wanted)
    assert read == [(x * 2).sum().item()]


def test_a_boundary_that_writes_a_cache_does_so_once_per_replay(device):
    cache = torch.zeros(4, WIDTH, device=device)

    @eager_boundary
    def attend(h):
        cache[: h.size(0)].add_(1)
        return h + cache[: h.size(0)]

    runner = segmented(device, lambda x: attend(x * 2) * 2, [4])
    assert (cache == 0).all()
    x = randn(4, WIDTH, device=device)
    assert same(runner.run({"x": x}), (x * 2 + 1) * 2)
    assert same(runner.run({"x": x}), (x * 2 + 2) * 2)
    assert (cache == 2).all()


def test_segments_that_change_state_do_so_once_per_replay(device):
    before, behind = torch.zeros((), device=device), torch.zeros((), device=device)
    attend, _ = counted(lambda h: h * 2)

    def step(x):
        before.add_(1)
        h = attend(x)
        behind.add_(1)
        return h + before + behind

    runner = segmented(device, step, [4])
    assert (before.item(), behind.item()) == (0, 0)
    x = randn(4, WIDTH, device=device)
    for times in (1, 2, 3):
        assert same(runner.run({"x": x}), x * 2 + times + times)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_boundary_with_parameters_of_its_own_leaves_no_autograd_history(device, grad):
    attention = mlp(device)
    attend = eager_boundary(lambda h: attention(h))
    layer = mlp(device)
    runner = segmented(device, lambda x: layer(attend(layer(x))) + x)
    for seed in range(3):
        batch = {"x": randn(3, WIDTH, device=device, seed=seed)}
        wanted = eager_padded(runner, batch)[:3]
        with grad():
            out = runner.run(batch)
            assert not out.requires_grad
            assert same(out, wanted)


def test_two_piecewise_runners_may_share_a_pool(device):
    attend, _ = counted(lambda h: h * 2)
    one = segmented(device, lambda x: attend(x + 1) + x)
    two = segmented(device, lambda x: attend(attend(x) + 3) - x, pool=one.pool)
    for n in (4, 1, 3):
        assert agrees(one, device, [n])
        assert agrees(two, device, [n])


def test_piecewise_graphs_pass_verify(device):
    attend, _ = counted(lambda h: h.tanh())
    layers = [mlp(device) for _ in range(3)]

    def step(x):
        for layer in layers:
            x = x + layer(attend(x))
        return x

    assert segmented(device, step, [2, 4, 8]).verify().passed
