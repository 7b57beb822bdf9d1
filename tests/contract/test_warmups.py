"""Clause 5: warm-ups and recordings leave no trace."""

import pytest
import torch

from contract.steps import (
    WIDTH,
    CallCounter,
    eager_padded,
    ints,
    is_recording,
    key,
    make_runner,
    randn,
    rng_state,
    same,
    unchanged,
    x_field,
)
from ostinato.graphs import CaptureOptions, Field, GraphMode, eager_boundary

MODES = [GraphMode.FULL, GraphMode.PIECEWISE]


@eager_boundary
def attend(q, kv):
    kv[:, 0].add_(1)
    return q * 2


@pytest.mark.parametrize("declared", [False, True], ids=["journal", "declared"])
@pytest.mark.parametrize("warmups", [0, 1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_counters_caches_and_random_numbers_are_as_before(device, mode, warmups, declared):
    counter = torch.zeros((), dtype=torch.int64, device=device)
    put, copied, by_mask = (randn(6, WIDTH, device=device, seed=i) for i in range(3))
    attended = randn(6, WIDTH, device=device, seed=9)

    def step(x, slots):
        counter.add_(1)
        put.index_put_((slots,), x)
        copied.index_copy_(0, slots, x + 1)
        put.index_put_((slots,), torch.ones_like(x), accumulate=True)
        by_mask.masked_fill_(by_mask > 0, 5)
        noise = torch.rand(x.shape, device=device)
        return attend(x, attended) + noise + counter

    state = {"counter": counter, "put": put, "copied": copied, "mask": by_mask, "attended": attended}
    fields = [x_field(), Field("slots", torch.int64)]

    def dummy(descriptor):
        n = descriptor.num_tokens
        return {"x": randn(n, WIDTH, device=device), "slots": torch.arange(n, device=device)}

    with unchanged(*state.values(), rng=device):
        runner = make_runner(
            device,
            step,
            [1, 2, 4],
            fields=fields,
            mode=mode,
            options=CaptureOptions(warmups=warmups),
            state=state if declared else None,
            dummy=dummy,
        )
    runner.run({"x": randn(2, WIDTH, device=device), "slots": ints([3, 4], device)})
    assert counter.item() == 1


@pytest.mark.parametrize("mode", MODES)
def test_the_random_generator_stands_where_it_stood(device, mode):
    torch.manual_seed(5)
    before = rng_state(device)
    make_runner(
        device, lambda x: attend(torch.rand_like(x), x.clone()) + torch.randn_like(x), [1, 4], mode=mode
    )
    assert same(rng_state(device), before)


def test_a_step_is_called_once_per_warmup_and_once_to_record(device):
    for warmups in (0, 1, 3):
        step = CallCounter(lambda x: x * 2)
        make_runner(device, step, [2, 4], options=CaptureOptions(warmups=warmups))
        assert step.calls == 2 * (warmups + 1)


def test_warmups_come_before_recording(device):
    seen = []

    def step(x):
        seen.append((x.size(0), is_recording()))
        return x * 2

    make_runner(device, step, [2, 4])
    per_rung = [False, False, True]
    assert seen == [(4, recording) for recording in per_rung] + [(2, recording) for recording in per_rung]


def test_a_step_that_finds_something_cold_is_warmed_up_after_all(device):
    """Sizes are said to run the same kernels, and one does not: what it launches says so itself."""

    class NotThereYet(RuntimeError):
        is_cold = True

    made: set[int] = set()

    def step(x):
        if is_recording() and x.size(0) not in made:
            raise NotThereYet("a kernel is launched for the first time while a graph is captured")
        made.add(x.size(0))
        return x * 2

    options = CaptureOptions(warmups=1)
    runner = make_runner(device, step, [2, 4], options=options, kernels_of=lambda key: "all the same")
    assert len(runner.graphs) == 2
    assert made == {2, 4}


def test_an_index_that_moves_on_after_it_was_used_does_not_mislead_the_journal(device):
    cache = randn(6, WIDTH, device=device)
    by_put = randn(6, WIDTH, device=device, seed=1)

    def step(x, slots):
        slot = slots.clone()
        for _ in range(2):
            cache.index_copy_(0, slot, x)
            by_put.index_put_((slot,), x)
            slot.add_(1)
        return x * 2

    fields = [x_field(), Field("slots", torch.int64, pad=1)]
    with unchanged(cache, by_put):
        make_runner(device, step, [1], fields=fields)


def test_writes_that_feed_each_other_are_undone_in_reverse_order(device):
    positions, cache = ints([0, 1, 2, 3], device), randn(8, device=device)

    def step(x):
        cache.index_copy_(0, positions, x.sum(1))
        positions.add_(1)
        cache.index_put_((positions,), x.sum(1))
        cache[:4].mul_(2)
        return x * cache[positions][:, None]

    with unchanged(positions, cache):
        runner = make_runner(device, step, [4])
    x = randn(4, WIDTH, device=device)
    wanted_positions, wanted_cache = positions.clone(), cache.clone()
    out = runner.run({"x": x}).clone()
    got = (out, positions.clone(), cache.clone())
    positions.copy_(wanted_positions)
    cache.copy_(wanted_cache)
    assert same(got, (step(x), positions, cache))


def test_a_sink_that_is_one_page_of_a_cache_does_not_excuse_writes_to_the_other_pages(device):
    pages = randn(4, WIDTH, device=device)

    def step(x, page):
        pages.index_put_((page,), x)
        return pages[page] * 2

    def dummy(descriptor):
        return {"x": randn(descriptor.num_tokens, WIDTH, device=device, seed=1), "page": ints([2, 3], device)}

    fields = [x_field(), Field("page", torch.int64)]
    with unchanged(pages[1:]):
        make_runner(device, step, [2], fields=fields, dummy=dummy, sinks={"page 0": pages[0]})


@pytest.mark.parametrize("mode", MODES)
def test_the_running_statistics_of_batch_norm_are_as_before(device, mode):
    norm = torch.nn.BatchNorm1d(WIDTH, device=device).train()
    dummy = lambda descriptor: {"x": randn(descriptor.num_tokens, WIDTH, device=device)}  # noqa: E731
    with unchanged(norm.running_mean, norm.running_var, norm.num_batches_tracked):
        runner = make_runner(device, lambda x: norm(x), [4], dummy=dummy, mode=mode)
    twin = torch.nn.BatchNorm1d(WIDTH, device=device).train()
    x = randn(4, WIDTH, device=device, seed=1)
    runner.run({"x": x})
    twin(x)
    assert torch.allclose(norm.running_mean, twin.running_mean)
    assert norm.num_batches_tracked.item() == 1


def test_a_warm_up_that_raises_leaves_no_trace_either(device):
    counter, cache = torch.zeros((), device=device), randn(4, WIDTH, device=device)
    armed = True

    def step(x):
        counter.add_(1)
        cache.index_put_((ints([0], device),), x[:1]) if not is_recording() else None
        torch.rand(3, device=device)
        if armed:
            raise ValueError("not today")
        return x + counter

    with unchanged(counter, cache, rng=device):
        runner = make_runner(device, step, [2], capture=False)
        runner.capture(progress=False)
    assert "not today" in runner.failures[key(2)]
    armed = False
    with unchanged(counter, cache):
        runner.capture(progress=False)
    assert list(runner.graphs) == [key(2)]


@pytest.mark.parametrize("mode", MODES)
def test_a_recording_that_raises_leaves_no_trace_either(device, mode):
    counter, attended = torch.zeros((), device=device), randn(4, WIDTH, device=device)

    def step(x):
        counter.add_(1)
        y = attend(x, attended)
        torch.rand(3, device=device)
        if is_recording():
            raise ValueError("not while recording")
        return y + counter

    with unchanged(counter, attended, rng=device):
        runner = make_runner(device, step, [2], capture=False, mode=mode)
        runner.capture(progress=False)
    assert "not while recording" in runner.failures[key(2, mode)]


def test_the_first_replay_starts_from_the_state_before_the_capture(device):
    counter = torch.full((), 10.0, device=device)
    runner = make_runner(device, lambda x: x + counter.add_(1), [2])
    x = randn(2, WIDTH, device=device)
    assert same(runner.run({"x": x}), x + 11)
    assert same(runner.run({"x": x}), x + 12)


def test_a_separate_generator_is_as_before(device):
    generator = torch.Generator(device).manual_seed(11)
    options = CaptureOptions(generators=(generator,))
    before = generator.get_state()
    make_runner(
        device, lambda x: x + torch.rand(x.shape, device=device, generator=generator), [2], options=options
    )
    assert same(generator.get_state(), before)


def test_memory_made_while_warming_up_may_be_kept_by_the_step(device):
    made = {}

    def step(x):
        if x.size(0) not in made:
            made[x.size(0)] = torch.full((x.size(0), 1), 2.0, device=device)
        return x * made[x.size(0)]

    runner = make_runner(device, step, [2, 4])
    for n in (4, 2, 3):
        batch = {"x": randn(n, WIDTH, device=device)}
        assert same(runner.run(batch), eager_padded(runner, batch)[:n])
