"""Random numbers inside graphs: fresh on each replay, reproducible from a seed, as in eager."""

import pytest
import torch

from contract.steps import WIDTH, eager_padded, make_runner, mlp, randn, rng_state, same
from ostinato.graphs import CaptureOptions, GraphMode, eager_boundary, graphed

MODES = [GraphMode.FULL, GraphMode.PIECEWISE]


@eager_boundary
def boundary(h):
    return h + torch.rand_like(h)


def noisy(x):
    h = x + torch.rand_like(x)
    h = torch.nn.functional.dropout(h, 0.5)
    h = boundary(h)
    return h + torch.randn(x.shape, device=x.device)


@pytest.mark.parametrize("mode", MODES)
def test_each_replay_draws_fresh_numbers(device, mode):
    runner = make_runner(device, noisy, [4], mode=mode)
    batch = {"x": randn(4, WIDTH, device=device)}
    draws = [runner.run(batch).clone() for _ in range(4)]
    assert all(not same(draws[i], draws[j]) for i in range(4) for j in range(i))


@pytest.mark.parametrize("mode", MODES)
def test_replays_are_reproducible_from_a_seed(device, mode):
    runner = make_runner(device, noisy, [2, 4], mode=mode)

    def draws():
        torch.manual_seed(17)
        return [runner.run({"x": randn(n, WIDTH, device=device)}).clone() for n in (4, 2, 3, 4)]

    assert same(draws(), draws())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [3, 4])
def test_a_replay_draws_what_eager_draws_from_the_same_seed_at_the_same_padded_shape(device, mode, n):
    runner = make_runner(device, noisy, [4], mode=mode)
    batch = {"x": randn(n, WIDTH, device=device)}
    torch.manual_seed(23)
    wanted = [eager_padded(runner, batch)[:n].clone() for _ in range(3)]
    after_eager = torch.rand(3, device=device)
    torch.manual_seed(23)
    got = [runner.run(batch).clone() for _ in range(3)]
    assert same(got, wanted)
    assert same(torch.rand(3, device=device), after_eager), "the generator stands where eager leaves it"


def test_eager_draws_between_replays_continue_the_same_stream(device):
    runner = make_runner(device, noisy, [4])
    batch = {"x": randn(4, WIDTH, device=device)}

    def both(step):
        torch.manual_seed(29)
        return [step().clone(), torch.rand(5, device=device), step().clone()]

    assert same(both(lambda: runner.run(batch)), both(lambda: eager_padded(runner, batch)))


@pytest.mark.parametrize("mode", MODES)
def test_capturing_does_not_advance_the_generator(device, mode):
    torch.manual_seed(31)
    wanted = torch.rand(5, device=device)
    torch.manual_seed(31)
    before = rng_state(device)
    make_runner(device, noisy, [1, 2, 4], mode=mode)
    assert same(rng_state(device), before)
    assert same(torch.rand(5, device=device), wanted)


def test_dropout_of_a_module_in_training_mode(device):
    f = graphed(torch.nn.Sequential(mlp(device), torch.nn.Dropout(0.5)).train(), ladder=[4])
    x = randn(4, WIDTH, device=device)
    f(x)
    torch.manual_seed(37)
    got = [f(x).clone() for _ in range(2)]
    torch.manual_seed(37)
    with torch.no_grad():
        wanted = [f.unwrap()(x) for _ in range(2)]
    assert same(got, wanted)
    assert not same(got[0], got[1])


def test_the_first_call_of_a_graphed_function_draws_like_any_other(device):
    x = randn(4, WIDTH, device=device)
    torch.manual_seed(41)
    wanted = [noisy(x), noisy(x)]
    torch.manual_seed(41)
    f = graphed(noisy, ladder=[4])
    assert same([f(x).clone(), f(x).clone()], wanted)


@pytest.mark.parametrize("mode", MODES)
def test_a_generator_of_ones_own(device, mode):
    generator = torch.Generator(device).manual_seed(43)

    def step(x):
        return boundary(x) * 0 + torch.rand(x.shape, device=x.device, generator=generator)

    before = generator.get_state()
    runner = make_runner(device, step, [4], mode=mode, options=CaptureOptions(generators=(generator,)))
    assert same(generator.get_state(), before)
    batch = {"x": torch.zeros(4, WIDTH, device=device)}
    generator.manual_seed(47)
    got = [runner.run(batch).clone() for _ in range(3)]
    generator.manual_seed(47)
    wanted = [step(**batch) for _ in range(3)]
    assert same(got, wanted)
    assert not same(got[0], got[1])


def test_sampling_inside_a_graph_is_fresh_and_reproducible(device):
    def sample(x):
        probabilities = x.softmax(-1)
        noise = torch.empty_like(probabilities).exponential_()
        return (probabilities / noise).argmax(-1), torch.bernoulli(probabilities)

    runner = make_runner(device, sample, [8])
    batch = {"x": torch.zeros(8, WIDTH, device=device)}

    def draws():
        torch.manual_seed(53)
        return [tuple(out.clone() for out in runner.run(batch)) for _ in range(6)]

    first = draws()
    assert same(first, draws())
    assert len({tuple(out[0].tolist()) for out in first}) > 1
    assert len({tuple(out[1].flatten().tolist()) for out in first}) > 1


def test_verify_compares_random_steps_from_the_same_seed_and_leaves_the_generator_alone(device):
    runner = make_runner(device, noisy, [2, 4])
    torch.manual_seed(59)
    before = rng_state(device)
    assert runner.verify().passed
    assert same(rng_state(device), before)
