"""Caches and weights made in inference mode, which autograd keeps no versions of."""

import pytest
import torch

from contract.steps import WIDTH, key, make_runner, mlp, padded, randn, reasons, same, wrap, x_field
from ostinato.graphs import Field, GraphMode, eager_boundary


class Cached:
    """A step that writes rows into a cache and reads them back; slot 0 is padding's."""

    def __init__(self, device, inference=True):
        with torch.inference_mode(inference):
            self.cache = torch.zeros(8, WIDTH, device=device)
            self.count = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, x, slots):
        self.count.add_(1)
        self.cache.index_copy_(0, slots, x)
        self.cache[1].mul_(1)
        return self.cache.index_select(0, slots) * 2 + self.count


def batch(n, device, seed):
    return randn(n, WIDTH, device=device, seed=seed), torch.arange(1, n + 1, device=device)


def follows(f, step, twin, device):
    """Calls do to the cache what eager calls do to its twin's, padding's slot aside."""
    for seed, n in enumerate((3, 1, 4, 2)):
        x, slots = batch(n, device, seed)
        assert same(f(x, slots), twin(x, slots)), seed
        assert same(step.cache[1:], twin.cache[1:]), seed
        assert same(step.count, twin.count)
    return True


def test_a_cache_made_in_inference_mode_is_written_by_replays(device):
    step, twin = Cached(device), Cached(device, inference=False)
    f = wrap(step, pads={"slots": 0})
    with torch.inference_mode():
        assert follows(f, step, twin, device)
    assert (reasons(f), f.report().replays) == ({}, 4)


def test_it_can_be_captured_ahead_and_leaves_no_trace(device):
    step, twin = Cached(device), Cached(device, inference=False)
    f = wrap(step, pads={"slots": 0})
    with torch.inference_mode():
        f.capture(*batch(3, device, 9))
        assert step.count.item() == 0
        assert same(step.cache, torch.zeros_like(step.cache))
        assert follows(f, step, twin, device)
        assert f.report().replays == 4
        f.recapture()
        assert step.count.item() == 4
        assert f.verify().passed
        assert step.count.item() == 4
    assert reasons(f) == {}


def test_what_was_captured_in_inference_mode_is_replayed_outside_of_it(device):
    step, twin = Cached(device), Cached(device, inference=False)
    f = wrap(step, pads={"slots": 0})
    with torch.inference_mode():
        f.capture(*batch(3, device, 9))
    with torch.no_grad():
        assert follows(f, step, twin, device)
    assert (reasons(f), f.report().replays) == ({}, 4)


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE])
def test_a_runner_writes_a_cache_made_in_inference_mode(device, mode):
    step, twin = Cached(device), Cached(device, inference=False)
    marked = eager_boundary(lambda h: h + 1)
    with torch.inference_mode():
        runner = make_runner(
            device,
            lambda x, slots: marked(step(x, slots)),
            [2, 4],
            mode=mode,
            fields=[x_field(), Field("slots", torch.int64)],
        )
        assert key(4, mode) in runner.graphs
        assert step.count.item() == 0
        for seed, n in enumerate((3, 1, 4, 2)):
            x, slots = batch(n, device, seed)
            assert same(runner.run({"x": x, "slots": slots}), twin(x, slots) + 1), seed
            assert same(step.cache[1:], twin.cache[1:])
    assert runner.report().replays == 4


def test_a_model_loaded_in_inference_mode_is_served(device):
    with torch.inference_mode():
        model = mlp(device)
        model.register_buffer("seen", torch.zeros((), device=device))
        model.register_forward_hook(lambda module, args, out: out + module.seen.add_(1))
        f = wrap(model)
        x = randn(3, WIDTH, device=device)
        for call in range(1, 4):
            out = f(x).clone()
            assert model.seen.item() == call
            model.seen.sub_(1)
            assert same(out, model(padded(x, 4))[:3])
    assert f.report().replays == 3


def test_a_cache_that_the_first_call_makes_in_inference_mode_is_kept(device):
    caches, sums = {}, []

    def step(x):
        if "cache" not in caches:
            caches["cache"] = torch.zeros(WIDTH, device=device)
        caches["cache"].add_(1)
        return x + caches["cache"]

    f = wrap(step)
    x = randn(3, WIDTH, device=device)
    with torch.inference_mode():
        for call in range(1, 5):
            assert same(f(x), x + call)
            sums.append(caches["cache"][0].item())
    assert sums == [1, 2, 3, 4]
    assert (reasons(f), f.report().replays) == ({"first-call": 1}, 3)
