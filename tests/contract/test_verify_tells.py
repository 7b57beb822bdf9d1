"""What `verify` says of programs that are right, and of graphs in which something was changed."""

import pytest
import torch
import torch.nn.functional as F

from contract.steps import WIDTH, ints, make_runner, mlp, randn, same, strictly, wrap, x_field
from ostinato.graphs import Field, VerifyError

TABLE = torch.arange(40.0).view(10, 4)


def rows(device, n=4):
    return (randn(n, WIDTH, device=device),)


def with_ints(*values, n=4):
    return lambda device: (randn(n, WIDTH, device=device), *(ints(v, device) for v in values))


def table(device):
    return TABLE.to(device)


def model_of(make):
    """A program around a module made with fixed weights."""

    def program(device):
        torch.manual_seed(1)
        return make().to(device).eval()

    return program


def plain(function):
    return lambda device: function


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(12, WIDTH))

    def forward(self, x, slot):
        self.calls.add_(1)
        self.cache.mul_(0.9)
        self.cache[slot] = x
        return self.cache[slot] + 1


class Dropping(torch.nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5)


def in_bfloat16(x):
    return (x.bfloat16() @ x.new_ones(WIDTH, 64).bfloat16()).argmax(1), x.bfloat16() * 3


def segments(x, place):
    return torch.zeros(3, WIDTH, device=x.device).index_add_(0, place, x)


RIGHT = {
    "layers": (model_of(lambda: mlp(torch.device("cpu"))), rows, {}),
    "layer norm": (model_of(lambda: torch.nn.LayerNorm(WIDTH)), rows, {}),
    "batch norm in eval": (model_of(lambda: torch.nn.BatchNorm1d(WIDTH)), rows, {}),
    "recurrent": (
        model_of(lambda: torch.nn.GRU(4, 6, batch_first=True)),
        lambda device: (randn(4, 3, 4, device=device),),
        {},
    ),
    "convolution": (
        model_of(lambda: torch.nn.Conv1d(2, 3, 3)),
        lambda device: (randn(4, 2, 9, device=device),),
        {},
    ),
    "softmax of rows": (plain(lambda x: x.softmax(1)), rows, {}),
    "attention": (
        plain(lambda x: F.scaled_dot_product_attention(x, x, x)),
        lambda device: (randn(4, 5, WIDTH, device=device),),
        {},
    ),
    "a mask of -inf": (
        plain(lambda x: x.masked_fill(x < 0, float("-inf"))),
        rows,
        {},
    ),
    "an infinite column": (plain(lambda x: torch.cat([x, x[:, :1] / 0], 1)), rows, {}),
    "tiny numbers": (plain(lambda x: (x @ x.new_ones(WIDTH, 3)) * 1e-7), rows, {}),
    "huge numbers": (plain(lambda x: x.exp() * 1e20), rows, {}),
    "complex numbers": (plain(lambda x: torch.fft.rfft(x)), rows, {}),
    "top of rows": (plain(lambda x: x.topk(3, 1)), rows, {}),
    "places of the largest": (plain(lambda x: x.argmax(1)), rows, {}),
    "places of the largest of few bits": (plain(in_bfloat16), rows, {}),
    "dropout": (lambda device: Dropping().train(), rows, {}),
    "noise": (plain(lambda x: x + torch.randn_like(x)), rows, {}),
    "segment sums": (plain(segments), with_ints([0, 2, 1, 1]), {}),
    "scaled by the largest": (plain(lambda x: x / x.abs().max()), rows, {}),
    "products of all rows": (plain(lambda x: x @ (x.T @ x)), rows, {}),
    "scaled and rounded": (
        plain(lambda x: (x * (127 / x.abs().amax())).round() * x.abs().amax() / 127),
        rows,
        {},
    ),
    "weights counted": (
        plain(lambda x, place: x[:, 0].new_zeros(5).index_put_((place,), x[:, 0], accumulate=True)),
        with_ints([0, 4, 2, 2]),
        {},
    ),
    "two indices that are legal together": (
        lambda device: lambda x, a, b, t=table(device): x[:, :4] + t[a * 3 + b],
        with_ints([0, 3, 1, 2], [2, 0, 2, 1]),
        {},
    ),
    "positions within lengths": (
        plain(lambda x, start, size: x.gather(1, (start + size - 1)[:, None])),
        with_ints([0, 6, 1, 3], [7, 2, 3, 5]),
        {"pads": {"size": 1}},
    ),
    "numbers that become an index": (
        lambda device: (
            lambda x, t=table(device): t[(x[:, 0].sigmoid() * 9).long()] + t[x[:, 1].abs().long() % 3]
        ),
        rows,
        {},
    ),
    "numbers that are an index": (
        lambda device: lambda x, t=table(device): t[x[:, 0].long()],
        lambda device: (torch.arange(32.0, device=device).view(4, 8) / 4,),
        {},
    ),
    "a cache with a place for padding": (
        model_of(Counting),
        with_ints([3, 1, 0, 5]),
        {"pads": {"slot": 11}},
    ),
}


@pytest.mark.parametrize(
    ("ladder", "seeds"), [([2, 4], 1), pytest.param([1, 3, 5, 8], 8, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes(device, name, ladder, seeds):
    make, arguments, settings = RIGHT[name]
    program = make(device)
    f = wrap(program, ladder, options=strictly(), **settings)
    state = [t.clone() for t in getattr(program, "buffers", list)()]
    f.capture(*arguments(device))
    for seed in range(seeds):
        outcome = f.verify(seed=seed)
        assert outcome.passed
        assert len(outcome.checks) >= 2 * len(ladder) - 1
    assert same(list(getattr(program, "buffers", list)()), state)


def test_rows_that_a_smaller_graph_serves_are_not_tried_with_padding(device):
    """A branch on the number of rows is right as long as those sizes have graphs of their own."""

    def branching(x):
        return x * 2 if x.shape[0] <= 2 else x + 1

    served = wrap(branching, [1, 2, 6])
    for size in (5, 1, 3, 2, 6):
        x = randn(size, WIDTH, device=device)
        assert same(served(x), branching(x))
    outcome = served.verify()
    assert outcome.passed
    tried = [(check.descriptor, check.batch) for check in outcome.checks]
    assert [each for each in tried if each[0] != each[1]] == [("decode 6x1", "decode 3x1")]
    assert served.doctor(randn(3, WIDTH, device=device)).is_healthy
    padded = make_runner(device, branching, [1, 6])
    with pytest.raises(VerifyError, match="decode 6x1 with decode 2x1"):
        padded.verify()


def test_a_program_whose_rows_see_each_other_but_not_padding_is_said_to_be_one(device):
    f = wrap(lambda x: {"mixed": x / x.abs().max()}, [2, 4])
    f.capture(*rows(device))
    outcome = f.verify()
    assert any(check.mixes_rows for check in outcome.checks)
    shown = f.verify().table()
    assert any("rows mix" in str(cell) for cell in shown.columns[-1].cells)


def test_arguments_that_are_illegal_together_are_named_and_taken_as_they_were(device):
    make, arguments, _ = RIGHT["two indices that are legal together"]
    f = wrap(make(device), [2, 4])
    f.capture(*arguments(device))
    notes = [note for seed in range(8) for note in f.verify(seed=seed).notes]
    if device.type == "cpu":
        assert any("integers of a" in note and "IndexError" in note for note in notes), notes
    else:
        assert not notes, "nothing is tried that may be illegal"


def test_an_index_that_the_step_cannot_take_is_named(device):
    if device.type == "cuda":
        pytest.skip("an illegal index ends the process")
    fields = [x_field(), Field("place", torch.int64, sample=(5, 90))]
    runner = make_runner(device, lambda x, place: x[:, :4] + table(device)[place], [2], fields=fields)
    with pytest.raises(VerifyError, match=r"place from 5 to 89 \(IndexError: .*out of bounds"):
        runner.verify()


def test_nothing_to_check_is_no_success(device):
    f = wrap(lambda x: x - x.mean(0), [2, 4])
    f(*rows(device))
    with pytest.raises(VerifyError, match=r"nothing was checked[\s\S]*depends on the batch"):
        f.verify()
    runner = make_runner(device, lambda x: x * 2, [2, 4])
    runner.drop()
    with pytest.raises(VerifyError, match="nothing was checked"):
        runner.verify()


# -- planted faults ----------------------------------------------------------------------------------


class Planted:
    """A step whose captured graphs do what it did before `now` was set."""

    def __init__(self, before, now):
        self.before, self.now, self.is_now = before, now, False

    def __call__(self, x):
        return (self.now if self.is_now else self.before)(x)


WEIGHTS = randn(WIDTH, 3, device=torch.device("cpu"), seed=4)
OTHERS = WEIGHTS.clone()
OTHERS[5, 2] += 0.01


def once(at, value):
    def altered(x):
        y = x + 1
        y[at].fill_(value)
        return y

    return altered


CHANGED = {
    "a factor": (lambda x: x * 2, lambda x: x * 2.5, r"output\[\d, \d\] is"),
    "a weight": (WEIGHTS, OTHERS, r"output\[\d, 2\] is"),
    "one element": (once((0, 1), 1.0), once((0, 1), 1.25), r"output\[0, 1\] is 1 instead of 1\.25"),
    "one NaN": (once((0, 1), float("nan")), once((0, 1), 2.0), r"output\[0, 1\] is nan instead of 2"),
    "one infinity": (once((0, 1), 3.0), once((0, 1), float("inf")), r"output\[0, 1\] is 3 instead of inf"),
    "an integer": (lambda x: x.argmax(1), lambda x: x.argmax(1) + 1, r"output\[\d\] is \d instead of \d"),
    "a condition": (lambda x: x > 0, lambda x: x > 0.5, r"output\[\d, \d\] is True instead of False"),
    "one of two results": (
        lambda x: {"fine": x, "wrong": x + 1},
        lambda x: {"fine": x, "wrong": x + 2},
        r"output\['wrong'\]\[\d, \d\]",
    ),
    "a type": (
        lambda x: x,
        lambda x: x.double(),
        r"output is a tensor float32\[\d, 8\] instead of a tensor f",
    ),
    "a shape": (lambda x: x, lambda x: x[:, :3], r"output is a tensor float32\[\d, 8\] instead of"),
    "a structure": (lambda x: (x,), lambda x: (x, x), "returns 2 values"),
    "a number in Python": (lambda x: (x, 3), lambda x: (x, 4), r"output\[1\] is 3 instead of 4"),
    "tiny numbers": (lambda x: x * 1e-5, lambda x: x * 2e-5, r"output\[\d, \d\]"),
    "few bits": (lambda x: x.bfloat16(), lambda x: x.bfloat16() * 1.2, r"output\[\d, \d\]"),
    "beside huge numbers": (
        lambda x: torch.cat([x, x + 1e30], 1),
        lambda x: torch.cat([x * 1.01, x + 1e30], 1),
        r"output\[\d, \d\]",
    ),
    "only one size": (
        lambda x: x * 2,
        lambda x: x * (3 if len(x) == 2 else 2),
        r"1 of|2 of \d checks failed:\s+full decode 2x1",
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_was_changed_since_the_capture_is_named(device, name):
    before, now, said = CHANGED[name]
    if isinstance(before, torch.Tensor):
        before, now = (lambda x, w=w.to(device): x @ w for w in (before, now))
    step = Planted(before, now)
    runner = make_runner(device, lambda x: step(x), [2, 4])
    assert runner.verify().passed
    step.is_now = True
    with pytest.raises(VerifyError, match=said):
        runner.verify()


def test_the_very_element_of_the_very_graph_that_is_wrong_is_named(device, monkeypatch):
    runner = make_runner(
        device, mlp(device).forward, [2, 4], fields=[Field("input", torch.float32, (WIDTH,))]
    )
    launch = runner.launch

    def leaking(graph):
        launch(graph)
        if graph.descriptor.num_tokens == 4:
            graph.leaves[0][0, 3] += graph.leaves[0][3, 3]

    monkeypatch.setattr(runner, "launch", leaking)
    with pytest.raises(VerifyError) as caught:
        runner.verify()
    assert "output[0, 3]" in str(caught.value)
    assert "decode 4x1" in str(caught.value)
    assert "decode 2x1 with" not in str(caught.value)


@pytest.mark.parametrize("written", ["another row", "twice", "another value"])
def test_what_a_replay_leaves_elsewhere_is_named_and_undone(device, written):
    cache = randn(6, WIDTH, device=device)
    at, value, times = [1], [2.0], [1]

    def step(x):
        for _ in range(times[0]):
            cache[at[0]].add_(value[0])
        return x * 2

    runner = make_runner(device, step, [2])
    {"another row": at, "twice": times, "another value": value}[written][0] += 1
    before = cache.clone()
    with pytest.raises(VerifyError, match=r"what the step leaves in a tensor float32\[8\]\[\d\] is"):
        runner.verify()
    assert same(cache, before)


LEAKS = {
    "a mean": lambda x: x - x.mean(0),
    "a largest": lambda x: x - x.amax(0),
    "a softmax": lambda x: x.softmax(0),
    "a sum so far from behind": lambda x: x.flip(0).cumsum(0).flip(0) / 4 + x.mean(),
    "a number of rows": lambda x: x / len(x),
    "a row behind": lambda x: x + F.pad(x, (0, 0, 0, 1))[1:].exp(),
    "a little of the others": lambda x: x + 1e-3 * x.mean(0),
}


@pytest.mark.parametrize("name", LEAKS)
def test_padding_that_leaks_into_rows_is_named(device, name):
    runner = make_runner(device, LEAKS[name], [2, 4])
    with pytest.raises(VerifyError, match=r"output.*(depends on the batch|under poison)"):
        runner.verify()
