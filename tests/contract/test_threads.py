"""Several threads: they take turns, guarded results belong to one of them, and captures disturb nobody."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from contract.steps import WIDTH, CallCounter, close, make_runner, mlp, padded, randn, reasons, same, wrap
from ostinato.graphs import BatchError, CaptureOptions, GraphPool


@pytest.fixture
def hasty_switches():
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def together(*jobs):
    """Run these at the same time; the first exception of any is raised."""
    start = threading.Barrier(len(jobs))

    def after_the_others_started(job):
        start.wait(10)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(60) for future in [pool.submit(after_the_others_started, job) for job in jobs]]


# -- guarded results belong to one thread ----------------------------------------------------------------


def test_a_call_from_another_thread_is_refused_and_says_what_to_do(device):
    f = wrap(lambda x: x * 2, results="guarded")
    x = randn(3, WIDTH, device=device)
    f(x)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(BatchError, match="results='copied'"):
            pool.submit(f, x).result()
        assert same(f(x), x * 2)
        with pytest.raises(BatchError, match="results='copied'"):
            pool.submit(f, x).result()
    assert f.report().replays == 2


def test_a_modules_results_belong_to_one_thread_as_well(device):
    f = wrap(mlp(device), results="guarded")
    x = randn(3, WIDTH, device=device)
    f(x)
    with ThreadPoolExecutor(1) as pool, pytest.raises(BatchError, match="results='copied'"):
        pool.submit(f, x).result()


def test_capturing_ahead_in_one_thread_is_for_another_to_use(device):
    f = wrap(lambda x: x * 2, results="guarded")
    x = randn(3, WIDTH, device=device)
    f.capture(x)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            assert same(pool.submit(f, x).result(), x * 2)
        with pytest.raises(BatchError, match="results='copied'"):
            f(x)
    assert same(f(x), x * 2), "the other thread has ended"
    assert (reasons(f), f.report().replays) == ({}, 3)


def test_a_thread_that_has_ended_gives_the_wrapper_up(device):
    f = wrap(lambda x: x * 2, results="guarded")
    x = randn(3, WIDTH, device=device)
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            assert same(pool.submit(lambda: f(x).clone()).result(), x * 2)
    assert same(f(x), x * 2)


def test_copies_of_another_wrapper_do_not_overwrite_what_another_thread_holds(device):
    pool = GraphPool(device)
    f, g = wrap(lambda x: x * 2, results="guarded", pool=pool), wrap(lambda x: x * 3, pool=pool)
    x = randn(3, WIDTH, device=device)
    held = f(x)
    with ThreadPoolExecutor(1) as threads, pytest.raises(BatchError, match="guarded results"):
        threads.submit(g, x).result()
    assert same(held.clone(), x * 2)
    assert same(g(x), x * 3)


# -- copies are for any thread ---------------------------------------------------------------------------


@pytest.mark.parametrize(("made_of", "count"), [("function", 1000), ("module", 250)])
def test_thousands_of_calls_from_two_threads_all_come_out_right(device, made_of, count, hasty_switches):
    model = mlp(device)
    f = wrap(model if made_of == "module" else lambda x: x * 2 + 1)
    with torch.no_grad():
        inputs = [randn(n, WIDTH, device=device, seed=n + 10 * i) for i in range(2) for n in (1, 2, 3, 4)]
        wanted = [
            model(padded(x, 2 if len(x) < 3 else 4))[: len(x)] if made_of == "module" else x * 2 + 1
            for x in inputs
        ]

    def calls(offset):
        kept = None
        for i in range(count):
            choice = 4 * offset + i % 4
            out = f(inputs[choice])
            assert same(out, wanted[choice]), i
            if kept is not None:
                assert same(kept, wanted[4 * offset + (i - 1) % 4]), "the result before this one"
            kept = out

    together(lambda: calls(0), lambda: calls(1))
    assert f.report().replays == 2 * count
    assert reasons(f) == {}


def test_every_caller_has_results_in_memory_of_its_own(device):
    f = wrap(lambda x: {"y": x * 2, "z": (x + 1, x)})
    xs = [randn(3, WIDTH, device=device, seed=seed) for seed in range(4)]
    outs = [f(x) for x in xs]
    with ThreadPoolExecutor(1) as pool:
        outs += [pool.submit(f, x).result() for x in xs]
    for x, out in zip([*xs, *xs], outs, strict=True):
        assert same(out, {"y": x * 2, "z": (x + 1, x)})
    assert len({out["y"].data_ptr() for out in outs}) == 8


def test_state_advances_exactly_once_per_call_of_any_thread(device, hasty_switches):
    counter = torch.zeros((), dtype=torch.int64, device=device)

    def step(x):
        counter.add_(1)
        return x * 2

    f = wrap(step)
    x = randn(3, WIDTH, device=device)

    def calls():
        for _ in range(200):
            assert same(f(x), x * 2)

    together(calls, calls, calls)
    assert counter.item() == 600
    assert f.report().replays == 600


def test_first_calls_at_the_same_time_capture_once(device, hasty_switches):
    step = CallCounter(lambda x: x * 2)
    alone = CallCounter(lambda x: x * 2)
    x = randn(3, WIDTH, device=device)
    wrap(alone)(x)
    f = wrap(step)
    outs = together(*[lambda: f(x)] * 4)
    assert all(same(out, x * 2) for out in outs)
    assert len(f.report().graphs) == 2
    assert step.calls == alone.calls
    assert f.report().replays == 4


def test_eager_calls_of_threads_are_right_too(device, hasty_switches):
    f = wrap(lambda x: x * 2)
    small, large = randn(3, WIDTH, device=device), randn(7, WIDTH, device=device)

    def calls(x):
        for _ in range(100):
            assert same(f(x), x * 2)

    together(lambda: calls(small), lambda: calls(large))
    assert (reasons(f), f.report().replays) == ({"larger-than-max": 100}, 100)


# -- captures beside other threads ---------------------------------------------------------------------


def test_one_thread_captures_while_another_replays_and_both_come_out_right(device, hasty_switches):
    total = torch.zeros((), dtype=torch.int64, device=device)
    models = [mlp(device), mlp(device)]
    done = threading.Event()
    served = []

    def counted(model):
        def step(x):
            total.add_(1)
            return model(x)

        return step

    steady = wrap(counted(models[0]))
    x = randn(3, WIDTH, device=device)
    with torch.no_grad():
        wanted = models[0](padded(x, 4))[:3]
    steady.capture(x)

    def replays():
        while not done.is_set():
            assert same(steady(x), wanted), len(served)
            served.append(1)

    def captures():
        try:
            for _ in range(8):
                f = wrap(counted(models[1]))
                for _ in range(3):
                    assert same(f(x), wanted)
                assert (reasons(f), f.report().replays, f.report().failures) == ({}, 3, {})
        finally:
            done.set()

    together(replays, captures)
    assert len(served) > 0
    assert steady.report().replays == len(served)
    assert total.item() == len(served) + 8 * 3


def test_two_threads_capture_at_the_same_time(device, hasty_switches):
    def capture(factor):
        for i in range(5):
            f = wrap(lambda x: torch.relu(x * factor) + i)  # noqa: B023
            x = randn(3, WIDTH, device=device, seed=i)
            assert same(f(x), torch.relu(x * factor) + i)
            assert not f.report().failures

    together(lambda: capture(2), lambda: capture(3))


def test_runners_of_two_threads_come_out_right(device, hasty_switches):
    def work(factor):
        for i in range(5):
            runner = make_runner(device, lambda x: x * factor + 1, [2, 4])
            for n in (1, 2, 3, 4):
                x = randn(n, WIDTH, device=device, seed=i)
                assert same(runner.run({"x": x}), x * factor + 1)

    together(lambda: work(2), lambda: work(3))


# -- generators ----------------------------------------------------------------------------------------


class Elsewhere:
    """Another thread that draws from the host's generator all the time."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self._seed, self.draws, self._is_over = seed, [], threading.Event()
        self._thread = threading.Thread(target=self._draw)

    def _draw(self):
        while not self._is_over.wait(0.001):
            self.draws.append(torch.rand(1).item())

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()

    def are_fresh(self):
        """Whether the draws are those of one undisturbed stream."""
        torch.manual_seed(self._seed)
        return self.draws == [torch.rand(1).item() for _ in self.draws]


@pytest.mark.parametrize("way", ["first call", "capture", "runner", "recapture", "verify"])
def test_capturing_a_step_without_random_numbers_does_not_rewind_anyones_generator(device, way):
    def step(x):
        time.sleep(0.005)  # the other thread draws meanwhile
        return x * 2

    x = randn(3, WIDTH, device=device)
    with Elsewhere(seed=11) as other:
        if way == "runner":
            make_runner(device, step, [2, 4])
        else:
            f = wrap(step)
            f(x) if way == "first call" else f.capture(x)
            if way == "recapture":
                f.recapture()
            elif way == "verify":
                f.verify()
    assert len(other.draws) > 2
    assert other.are_fresh()


def test_a_step_that_draws_puts_back_only_what_it_drew_from(device):
    own = torch.Generator(device).manual_seed(5)
    before = own.get_state()

    def step(x):
        time.sleep(0.005)
        return x + torch.rand(x.shape, generator=own, device=x.device)

    f = wrap(step, [4], options=CaptureOptions(freeze_gc=False, generators=(own,)))
    x = randn(4, WIDTH, device=device)
    with Elsewhere(seed=11) as other:
        f.capture(x)
    assert same(own.get_state(), before)
    assert len(other.draws) > 2
    assert other.are_fresh()
    wanted = x + torch.rand(x.shape, generator=torch.Generator(device).manual_seed(5), device=device)
    assert close(f(x), wanted)


def test_a_capture_leaves_the_generator_alone_that_nobody_drew_from(device):
    torch.manual_seed(4)
    wanted = [torch.rand(1).item() for _ in range(2)]
    torch.manual_seed(4)
    got = [torch.rand(1).item()]
    f = wrap(lambda x: x * 2)
    f(randn(3, WIDTH, device=device))
    got.append(torch.rand(1).item())
    assert got == wanted
