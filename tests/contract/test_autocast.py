"""Mixed precision: autocast inside and outside a step, and models of several types."""

import pytest
import torch

from contract.steps import WIDTH, eager_padded, make_runner, mlp, randn, same, x_field
from ostinato.graphs import Field, GraphMode, Reason, graphed


def autocast(device, **more):
    return torch.autocast(device.type, dtype=torch.bfloat16, **more)


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE])
def test_an_autocast_region_inside_the_step(device, mode):
    model = mlp(device)

    def step(x):
        with autocast(device):
            y = model(x)
        assert y.dtype is torch.bfloat16
        return y.float() + model(x)

    runner = make_runner(device, step, [2, 4], mode=mode)
    for n in (1, 3, 4):
        batch = {"x": randn(n, WIDTH, device=device, seed=n)}
        assert same(runner.run(batch), eager_padded(runner, batch)[:n])


def test_weights_updated_in_place_reach_a_graph_with_an_autocast_region_inside(device):
    model = mlp(device)

    def step(x):
        with autocast(device):
            return model(x)

    runner = make_runner(device, step, [4])
    batch = {"x": randn(4, WIDTH, device=device)}
    before = runner.run(batch).clone()
    with torch.no_grad():
        model[2].weight.mul_(2)
    after = runner.run(batch).clone()
    assert not same(after, before)
    assert same(after, eager_padded(runner, batch))


def test_a_warmed_weight_cache_of_an_outer_autocast_does_not_get_into_the_graph(device):
    model = mlp(device)
    f = graphed(model, ladder=[4])
    x = randn(4, WIDTH, device=device)
    with autocast(device):
        model(x)  # with gradients: this is what autocast caches the casts of
        before = f(x).clone()
        with torch.no_grad():
            model[2].weight.mul_(2)
        after = f(x).clone()
    assert f.report().replays == 2
    with autocast(device), torch.no_grad():
        wanted = model(x)
    assert not same(after, before)
    assert same(after, wanted)


def test_a_cast_made_while_recording_is_not_met_by_eager_code_afterwards(device):
    model = mlp(device)
    x = randn(4, WIDTH, device=device)
    with autocast(device):
        f = graphed(model, ladder=[4])
        f(x)
        f(x * 1000)  # whatever lives in the pool has other values now
        got = model(x)
    with autocast(device, cache_enabled=False):
        assert same(got, model(x))


def test_the_cache_setting_is_as_the_user_had_it(device):
    for enabled in (True, False):
        with autocast(device, cache_enabled=enabled):
            make_runner(device, lambda x: x * 2, [2])
            assert torch.is_autocast_cache_enabled() is enabled


def test_an_autocast_around_a_runners_replay_does_not_act_a_second_time(device):
    model = mlp(device)
    runner = make_runner(device, lambda x: model(x), [4])
    batch = {"x": randn(4, WIDTH, device=device)}
    plain = runner.run(batch).clone()
    with autocast(device):
        around = runner.run(batch)
    assert around.dtype is torch.float32
    assert same(around, plain)


def test_another_autocast_state_than_at_capture_runs_eagerly_with_its_reason(device):
    model = mlp(device)
    f = graphed(model, ladder=[4])
    x = randn(3, WIDTH, device=device)
    f(x)
    with autocast(device):
        out = f(x)
        with torch.no_grad():
            wanted = model(x)
    assert out.dtype is torch.bfloat16
    assert same(out, wanted)
    assert f.report().eager_steps == {str(Reason.AUTOCAST_CHANGED): 1}
    f(x)
    assert f.report().replays == 2


def test_captured_under_autocast_means_replayed_under_autocast_and_eager_outside(device):
    f = graphed(mlp(device), ladder=[4])
    x = randn(4, WIDTH, device=device)
    with autocast(device):
        assert f(x).dtype is torch.bfloat16
        assert f(x).dtype is torch.bfloat16
    assert f(x).dtype is torch.float32
    report = f.report()
    assert (report.replays, dict(report.eager_steps)) == (2, {str(Reason.AUTOCAST_CHANGED): 1})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_another_type(device, dtype):
    model = mlp(device, dtype=dtype)
    runner = make_runner(device, lambda x: model(x), [2, 4], fields=[Field("x", dtype, (WIDTH,))])
    for n in (1, 2, 3, 4):
        batch = {"x": randn(n, WIDTH, device=device, seed=n, dtype=dtype)}
        out = runner.run(batch)
        assert out.dtype is dtype
        assert same(out, eager_padded(runner, batch)[:n])


def test_a_model_of_mixed_types(device):
    first, second = mlp(device, dtype=torch.bfloat16), mlp(device, dtype=torch.float64)
    norm = torch.nn.LayerNorm(WIDTH, device=device)

    def step(x, ids):
        h = first(x.to(torch.bfloat16))
        h = norm(h.float()) + ids[:, None].half()
        return second(h.double()), h, ids + 1, h > 0

    fields = [x_field(), Field("ids", torch.int32)]
    runner = make_runner(device, step, [2, 4], fields=fields)
    for n in (4, 1, 3):
        ids = torch.arange(n, dtype=torch.int32, device=device)
        batch = {"x": randn(n, WIDTH, device=device, seed=n), "ids": ids}
        wanted = eager_padded(runner, batch)
        assert same(runner.run(batch), tuple(leaf[:n] for leaf in wanted))
    assert runner.verify().passed
