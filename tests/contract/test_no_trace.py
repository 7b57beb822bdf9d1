"""Captures, trials and checks leave the caller's tensors as they were, and padding adds nothing to them."""

import random

import pytest
import torch

from contract.steps import WIDTH, ints, randn, reasons, same, strictly, wrap
from ostinato.graphs import CaptureError, VerifyError, graphed_train_step, make_graphed_callables

PLACES = 12
FREE = PLACES - 1
"""A place that no real row uses."""


def rows(i):
    return i[:, None].expand(-1, WIDTH)


def near(s, i):
    """Which places a batch names, as a mask over all of them."""
    return (torch.arange(PLACES, device=s.device)[:, None] == i).any(1)


def number(like, value):
    """A number to put into a tensor: no graph can have it copied to a GPU from the host."""
    return value if like.device.type == "cpu" else like.new_full((), value)


WRITES = {
    "setitem": lambda s, x, i: s.__setitem__(i, x),
    "a number": lambda s, x, i: s.__setitem__(i, number(s, 2.5)),
    "one column": lambda s, x, i: s.__setitem__((i, 1), x[:, 1]),
    "column of a view": lambda s, x, i: s[:, 2].__setitem__(i, x[:, 0]),
    "a mask": lambda s, x, i: s.__setitem__(near(s, i), 1.5),
    "index_put accumulating": lambda s, x, i: s.index_put_((i,), x, accumulate=True),
    "index_copy": lambda s, x, i: s.index_copy_(0, i, x),
    "index_add": lambda s, x, i: s.index_add_(0, i, x, alpha=2),
    "index_fill": lambda s, x, i: s.index_fill_(0, i, 0.5),
    "index_reduce": lambda s, x, i: s.index_reduce_(0, i, x, "amax"),
    "scatter": lambda s, x, i: s.scatter_(0, rows(i), x),
    "scatter a number": lambda s, x, i: s.scatter_(0, rows(i), 3.0),
    "scatter_add": lambda s, x, i: s.scatter_add_(0, rows(i), x),
    "scatter_reduce": lambda s, x, i: s.scatter_reduce_(0, rows(i), x, "amin"),
    "put": lambda s, x, i: s.put_(i * WIDTH, x[:, 0]),
    "put accumulating": lambda s, x, i: s.put_(i * WIDTH + 3, x[:, 0], accumulate=True),
    "masked_fill": lambda s, x, i: s.masked_fill_(near(s, i)[:, None], 0.25),
    "where": lambda s, x, i: s.copy_(torch.where(near(s, i)[:, None], s + 1, s)),
    "a slice": lambda s, x, i: s[1:3].copy_(s[2:4] * 0.5),
    "as many as rows": lambda s, x, i: s[: len(x)].copy_(x),
    "in place on a view": lambda s, x, i: s.view(-1)[::3].mul_(0.5),
    "transposed": lambda s, x, i: s.T[0].add_(1),
    "decay": lambda s, x, i: s.mul_(0.9),
    "running maximum": lambda s, x, i: s.copy_(torch.maximum(s, x.amax(0))),
    "what is there": lambda s, x, i: s.index_add_(0, (s[:2, 0].abs() * 3).long() % PLACES, s[:2].clone()),
}


class Program:
    """A few writes to two tensors, and a result that reads them."""

    def __init__(self, seed, device):
        choice = random.Random(seed)
        self.names = [(choice.choice(list(WRITES)), choice.randrange(2)) for _ in range(choice.randint(1, 3))]
        self.state = [randn(PLACES, WIDTH, device=device, seed=50 + seed + at) for at in range(2)]

    def __call__(self, x, i):
        read = self.state[0][i] + self.state[1][i]
        for name, at in self.names:
            WRITES[name](self.state[at], x, i)
        return read + x


def batch(n, seed, device):
    i = torch.randperm(FREE, generator=torch.Generator().manual_seed(seed))[:n]
    return randn(n, WIDTH, device=device, seed=seed), i.to(device)


def check(seed, device):
    """Returns whether graphs served."""
    program, twin = Program(seed, device), Program(seed, device)
    settings = {"pads": {"i": FREE}} if seed % 2 else {}
    f = wrap(program, [2, 4, 8], **settings)
    before = [tensor.clone() for tensor in program.state]

    def is_as_before():
        return same(program.state, before)

    f.capture(*batch(1 + seed % 5, seed, device))
    assert is_as_before(), (program.names, "capture")
    if f.report().graphs:
        try:
            f.verify()
        except VerifyError as error:
            pytest.fail(f"{program.names}: {error}")
        assert is_as_before(), (program.names, "verify")
    if seed % 4 < 2:
        f.doctor(*batch(3, seed, device))
        assert is_as_before(), (program.names, "doctor")
        f.recapture()
        assert is_as_before(), (program.names, "recapture")
    for turn, n in enumerate((3, 1, 5, 8, 2, 7)):
        x, i = batch(n, 100 * seed + turn, device)
        got, wanted = f(x, i), twin(x.clone(), i.clone())
        assert torch.allclose(got, wanted, atol=1e-4), (program.names, n)
        for one, other in zip(program.state, twin.state, strict=True):
            used = slice(None) if not settings else slice(0, FREE)
            assert torch.allclose(one[used], other[used], atol=1e-4), (program.names, n)
    return f.report().replays > 0


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in range(16, 640, 16))]
)
def test_programs_that_write_to_their_tensors_are_captured_without_a_trace(device, first):
    served = sum(check(seed, device) for seed in range(first, first + 16))
    assert 1 <= served < 16


@pytest.mark.parametrize("name", WRITES)
def test_each_write_alone(device, name):
    program = Program(0, device)
    program.names = [(name, 0)]
    for pads in ({}, {"i": FREE}):
        f = wrap(program, [2, 4, 8], pads=pads)
        before = [tensor.clone() for tensor in program.state]
        f.capture(*batch(3, 1, device))
        assert same(program.state, before)
        own_place = name not in ("a slice", "in place on a view", "transposed", "decay", "what is there")
        follows_rows = name in ("as many as rows", "running maximum", "where", "masked_fill", "a mask")
        if not own_place:
            assert f.report().graphs, f.report().failures
        elif not pads and name not in (
            "index_add",
            "index_put accumulating",
            "scatter_add",
            "put accumulating",
        ):
            assert not f.report().graphs
        elif not follows_rows:
            assert f.report().graphs, f.report().failures


# -- padded rows that write --------------------------------------------------------------------------


def test_padding_that_marks_a_row_is_refused_until_a_free_one_is_declared(device):
    seen = torch.zeros(PLACES, dtype=torch.bool, device=device)

    def step(x, ids):
        seen[ids] = number(seen, True)
        return x * 2

    for ids in ([0, 1, 2], [3, 4, 5], [0, 0, 0]):  # the last are padding to look at
        f = wrap(step, [2, 4])
        x = randn(3, WIDTH, device=device)
        f(x, ints(ids, device))
        assert seen.nonzero().flatten().tolist() == sorted(set(ids))
        seen.zero_()
        cause = next(iter(f.report().failures.values()))
        assert 'pads={"ids": ...}' in cause
        assert "every size" in cause
    for free, first in ((FREE, [0, 1, 2]), (0, [0, 0, 0])):
        f = wrap(step, [2, 4], pads={"ids": free}, options=strictly())
        f.capture(x, ints(first, device))
        f(x, ints([3, 4, 5], device))
        assert seen[1:FREE].nonzero().flatten().tolist() == [2, 3, 4]
        seen.zero_()
    f = wrap(step, [2, 4], pads={"ids": FREE}, options=strictly())
    for n in (3, 1, 2, 4):
        f(randn(n, WIDTH, device=device), torch.arange(n, device=device))
        assert seen[:FREE].sum() == n
        seen.zero_()
    assert f.report().replays == 4


def test_a_mask_that_one_place_stands_for_is_not_taken_for_no_padding(device):
    """All rows of the first call are at the place of padding, which a mask names once for all."""
    state = randn(PLACES, WIDTH, device=device)

    def step(x, ids):
        state.masked_fill_(near(state, ids)[:, None], 1.0)
        return x * 2

    f = wrap(step, [2, 4])
    f.capture(randn(1, WIDTH, device=device), ints([0], device))
    before = state.clone()
    f(randn(3, WIDTH, device=device), ints([3, 4, 5], device))
    before[3:6] = 1
    assert same(state, before)
    assert "capture with other values" in str(f.report().failures)


def test_a_mask_that_no_row_enters_is_served(device):
    state = randn(PLACES, WIDTH, device=device)

    def step(x, ids):
        state.mul_(2).masked_fill_(state > 5, 0)
        return x * ids[:, None]

    f = wrap(step, [2], options=strictly())
    f.capture(randn(2, WIDTH, device=device), torch.arange(2, device=device))
    assert f.verify().passed


def test_a_graph_for_every_size_may_write_as_many_rows_as_there_are(device):
    kept, twin = torch.zeros(PLACES, WIDTH, device=device), torch.zeros(PLACES, WIDTH, device=device)

    def step(x):
        kept[: len(x)] = x
        return x / len(x)

    f = wrap(step, [1, 2, 3, 4], options=strictly())
    for seed, n in enumerate((4, 3, 1, 2)):
        x = randn(n, WIDTH, device=device, seed=seed)
        assert same(f(x), x / n)
        twin[:n] = x
        assert same(kept, twin)
    assert f.report().replays == 4


def test_a_declared_place_excuses_no_other_write(device):
    """The padding of `slot` has a place of its own; that of `kind` is counted with the first kind."""
    cache, kinds = torch.zeros(PLACES, WIDTH, device=device), torch.zeros(3, device=device)

    def step(x, slot, kind):
        cache[slot] = x
        kinds.index_add_(0, kind, torch.ones_like(kind, dtype=torch.float32))
        return x + 1

    def capture(slots, kinds, **pads):
        f = wrap(step, [2, 4], pads={"slot": FREE, **pads})
        f.capture(randn(3, WIDTH, device=device), ints(slots, device), ints(kinds, device))
        return f.report()

    for slots in ([0, 1, 2], [FREE] * 3):
        for given in ([0, 1, 0], [1, 1, 1], [0, 0, 0]):
            assert 'pads={"kind": ...}' in str(capture(slots, given).failures)
            assert not capture(slots, given, kind=2).failures


def test_weights_of_zero_count_for_nothing(device):
    """Padded rows add zero to the first kind."""
    kinds, twin = torch.zeros(3, device=device), torch.zeros(3, device=device)

    def step(x, kind, weight):
        kinds.index_add_(0, kind, weight)
        return x + 1

    f = wrap(step, [2, 4], options=strictly())
    for n in (3, 1, 2):
        kind, weight = torch.arange(n, device=device), torch.rand(n, device=device)
        f(randn(n, WIDTH, device=device), kind, weight)
        twin.index_add_(0, kind, weight)
        assert torch.allclose(kinds, twin)


def test_a_cache_that_decays_may_have_a_place_for_padding(device):
    cache, twin = torch.zeros(PLACES, WIDTH, device=device), torch.zeros(PLACES, WIDTH, device=device)

    def step(x, slot, cache=cache):
        cache.mul_(0.5)
        cache[slot] = x
        return x + 1

    f = wrap(step, [2, 4], pads={"slot": FREE}, options=strictly())
    for seed, n in enumerate((3, 1, 2)):
        x, slot = randn(n, WIDTH, device=device, seed=seed), torch.arange(n, device=device)
        f(x, slot)
        twin.mul_(0.5)
        twin[slot] = x
        assert torch.allclose(cache[:FREE], twin[:FREE])
    assert f.report().replays == 3


@pytest.mark.parametrize("decays", [False, True])
def test_a_cache_that_is_an_argument_may_have_a_place_for_padding(device, decays):
    def step(x, slot, cache):
        if decays:
            cache.mul_(0.5)
        cache[slot] = x
        return cache[slot] + 1

    f = wrap(step, [2, 4], pads={"slot": FREE}, shared=["cache"], options=strictly())
    cache = torch.ones(PLACES, WIDTH, device=device)
    twin = cache.clone()
    for seed, n in enumerate((3, 1, 2)):
        x, slot = randn(n, WIDTH, device=device, seed=seed), torch.arange(n, device=device)
        assert same(f(x, slot, cache), step(x, slot, twin))
        assert same(cache[:FREE], twin[:FREE])
    assert f.report().replays == 3
    assert f.verify().passed
    g = wrap(step, [2, 4], shared=["cache"])
    g(x, slot, cache)
    assert 'pads={"slot": ...}' in str(g.report().failures)


def test_a_cache_that_is_written_a_row_at_a_time_is_not_copied(device, monkeypatch):
    """A cache may take most of the memory there is."""
    cache = torch.zeros(1 << 16, WIDTH, device=device)
    clone, largest = torch.Tensor.clone, []

    def noting(tensor, *args, **kwargs):
        largest.append(tensor.numel())
        return clone(tensor, *args, **kwargs)

    def step(x, slot):
        cache[slot] = x
        return cache[slot] + 1

    monkeypatch.setattr(torch.Tensor, "clone", noting)
    f = wrap(step, [2, 4], pads={"slot": 4095}, options=strictly())
    f(randn(3, WIDTH, device=device), torch.arange(3, device=device))
    f.verify()
    assert max(largest) < cache.numel()


@torch.library.custom_op("ostinato_tests::store", mutates_args=("table", "scratch"))
def store(x: torch.Tensor, slot: torch.Tensor, table: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    scratch[: len(x)] = x * 2
    table[slot] = scratch[: len(x)]
    return scratch[: len(x)] + 1


def test_an_operator_of_somebody_elses_may_work_in_memory_but_not_write_where_padding_says(device):
    table, scratch = (torch.ones(PLACES, WIDTH, device=device) for _ in range(2))
    twin = table.clone()

    def step(x, slot):
        return store(x, slot, table, scratch)

    x = randn(3, WIDTH, device=device)
    with pytest.raises(CaptureError, match=r'pads=\{"slot": \.\.\.\}'):
        wrap(step, [2, 4], options=strictly())(x, ints([3, 1, 2], device))
    f = wrap(step, [2, 4], pads={"slot": FREE}, options=strictly())
    assert same(table, twin)
    for seed, n in enumerate((3, 1, 2)):
        x, slot = randn(n, WIDTH, device=device, seed=seed), torch.arange(n, device=device)
        assert same(f(x, slot), x * 2 + 1)
        twin[slot] = x * 2
        assert same(table[:FREE], twin[:FREE])
    assert f.report().replays == 3


def test_a_tensor_that_a_trial_of_another_size_resized_has_its_size_again(device):
    into = torch.zeros(4, WIDTH, device=device)

    def step(x):
        torch.mul(x, 2, out=into)
        return into + 1

    f = wrap(step, [4])
    with pytest.warns(UserWarning, match="resized"):
        f.capture(randn(4, WIDTH, device=device))
    assert into.shape == (4, WIDTH)
    assert same(into, torch.zeros_like(into))


# -- extrema and histories ---------------------------------------------------------------------------

KEPT = {
    "maximum from -inf": (float("-inf"), lambda s, x: s.copy_(torch.maximum(s, x.amax(0)))),
    "minimum from inf": (float("inf"), lambda s, x: s.copy_(torch.minimum(s, x.amin(0)))),
    "minimum from 1e30": (1e30, lambda s, x: s.copy_(torch.minimum(s, x.amin(0)))),
    "maximum from -1e4": (-1e4, lambda s, x: s.copy_(torch.maximum(s, x.amax(0)))),
    "maximum from finfo.min": (
        torch.finfo(torch.float32).min,
        lambda s, x: s.copy_(torch.maximum(s, x.amax(0))),
    ),
    "a sum beside 1e9": (torch.tensor([1e9] + [0.0] * (WIDTH - 1)), lambda s, x: s[1:].add_((x + 1).sum())),
    "a history with 1e30": (
        torch.tensor([1e30] + [0.0] * (WIDTH - 1)),
        lambda s, x: s.copy_(torch.cat([(x + 1).mean()[None], s[:-1]])),
    ),
    "a histogram of integers": (
        torch.zeros(1000, dtype=torch.int64),
        lambda s, x: s.add_(
            torch.nn.functional.one_hot(x[:, 0].abs().mul(9).long().clamp(max=999), 1000).sum(0)
        ),
    ),
}


@pytest.mark.parametrize("sign", [1, -1, 0])
@pytest.mark.parametrize("name", KEPT)
def test_padding_does_not_enter_what_a_step_keeps_of_its_batches(device, name, sign):
    start, update = KEPT[name]
    start = start if isinstance(start, torch.Tensor) else torch.full((WIDTH,), start)
    state, twin = start.to(device).clone(), start.to(device).clone()

    def step(x):
        update(state, x)
        return x + 1

    f = wrap(step, [2, 4, 8])
    for seed, n in enumerate((4, 3, 8, 1, 5)):
        x = randn(n, WIDTH, device=device, seed=seed)
        x = (x.abs() + 1) * sign if sign else x
        f(x)
        update(twin, x)
        assert same(state, twin), n
    assert not f.report().graphs


def test_torchs_own_observers_are_refused(device):
    from torch.ao.quantization import MinMaxObserver, MovingAverageMinMaxObserver

    for kind in (MinMaxObserver, MovingAverageMinMaxObserver):
        observer, twin = kind().to(device), kind().to(device)
        f = wrap(lambda x: observer(x) + 1, [2, 4, 8])  # noqa: B023
        for seed, n in enumerate((4, 3, 1, 5)):
            x = randn(n, WIDTH, device=device, seed=seed).abs() + 1
            f(x)
            twin(x)
            assert same((observer.min_val, observer.max_val), (twin.min_val, twin.max_val))


def test_a_result_with_infinities_or_one_huge_column_hides_nothing(device):
    for beside in (float("-inf"), float("nan"), 1e30):
        f = wrap(lambda x: torch.cat([x - x.mean(0), torch.full_like(x, beside)], 1), [2, 4])  # noqa: B023
        f(randn(3, WIDTH, device=device))
        assert "depends on the batch" in str(f.report().failures)


def test_rounding_is_no_difference(device):
    """Sums that come out near zero differ in all digits with another order of additions."""
    weights = randn(256, 256, device=device)
    state = torch.zeros(256, device=device)

    def step(x):
        h = (x @ weights).softmax(1)
        state.copy_(h[0] - h[0].mean())
        return {"centred": h - h.mean(1, keepdim=True), "small": (x @ weights) * 1e-3}

    f = wrap(step, [2, 4, 8, 16], options=strictly())
    f.capture(randn(5, 256, device=device))


# -- the same for training ---------------------------------------------------------------------------


class Keeping(torch.nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.layer = way, torch.nn.Linear(4, 5)
        self.register_buffer("kept", torch.full((4,), 1e30))
        self.register_buffer("history", torch.tensor([1e30] + [0.0] * 5))

    def forward(self, x):
        if self.way == "minimum":
            self.kept.copy_(torch.minimum(self.kept, x.amin((0, 1))))
        elif self.way == "history":
            self.history.copy_(torch.cat([x.mean()[None], self.history[:-1]]))
        else:
            self.kept[:3].fill_(7)
        return self.layer(x)


@pytest.mark.parametrize("way", ["minimum", "history", "neither"])
def test_lengths_are_not_padded_where_padding_would_be_kept(device, way):
    def loss_fn(outputs, targets):
        return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Keeping(way).to(device))
    model, twin = models
    step = graphed_train_step(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), ladder=[4, 8])
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    for seed, length in enumerate((8, 3, 4, 6)):
        x = randn(2, length, 4, device=device, seed=seed).abs() + 1
        targets = torch.arange(2 * length, device=device).view(2, length) % 5
        step(x, targets)
        optimizer.zero_grad()
        loss_fn(twin(x), targets).backward()
        optimizer.step()
        assert same(model.kept, twin.kept)
        assert torch.allclose(model.history, twin.history)
    assert (step.report().eager_steps.get("padding-disabled", 0) > 0) == (way != "neither")


def test_trials_of_parts_leave_no_trace(device):
    class Marking(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(WIDTH, WIDTH)
            self.register_buffer("seen", torch.zeros(PLACES))

        def forward(self, x, ids):
            self.seen[ids] = number(self.seen, 1.0)
            return self.layer(x)

    model = Marking().to(device)
    make_graphed_callables(model, (randn(4, WIDTH, device=device), ints([1, 2, 3, 4], device)))
    assert model.seen.sum() == 0


def test_a_function_that_is_refused_runs_on_what_it_had(device):
    table = randn(PLACES, WIDTH, device=device)
    before = table.clone()

    def step(x, ids):
        table.index_copy_(0, ids, x)
        return x - x.mean(0)

    with pytest.raises(CaptureError):
        wrap(step, [2, 4], options=strictly()).capture(
            randn(3, WIDTH, device=device), ints([3, 4, 5], device)
        )
    assert same(table, before)
    f = wrap(step, [2, 4])
    x = randn(3, WIDTH, device=device, seed=1)
    assert same(f(x, ints([3, 4, 5], device)), x - x.mean(0))
    before[3:6] = x
    assert same(table, before)
    assert reasons(f) == {"capture-failed": 1}


def test_a_number_that_each_row_writes_has_no_places_that_padding_could_take(device):
    """What it holds afterwards is compared, as every state is."""
    seen, place = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)

    def step(x):
        for _ in range(len(x)):
            seen.scatter_(0, place, 1.0)
        return x * 2

    f = wrap(step, [2, 4])
    x = randn(3, WIDTH, device=device)
    assert same(f(x), x * 2)
    assert f.report().replays == 1
    assert seen == 1
