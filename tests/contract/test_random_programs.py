"""Programs put together at random, of operations on rows and of operations on whole batches: each result is
that of the program without graphs, whether a graph served it or not.

Not among them are roundings to few values, which hide for most numbers that rows depend on each other.
"""

import random

import pytest
import torch
import torch.nn.functional as F

from contract.steps import randn
from ostinato.graphs import CaptureOptions, graphed

WIDTH = 6
LADDER = [1, 2, 4, 8]


def attention(q, k):
    q, k = (t.view(-1, 1, 2, 3) for t in (q, k))
    return F.scaled_dot_product_attention(q, k, q).reshape(-1, WIDTH)


def column(values, x):
    return values.to(x.device)[:, None]


OF_ROWS = {
    "relu": lambda x, y, w: F.relu(x),
    "linear": lambda x, y, w: F.linear(x, w),
    "add": lambda x, y, w: x + y,
    "times": lambda x, y, w: x * y * 0.5,
    "shift": lambda x, y, w: x + w[0, 0],
    "in place": lambda x, y, w: x.clone().add_(y),
    "norm": lambda x, y, w: F.layer_norm(x, (WIDTH,)),
    "group norm": lambda x, y, w: F.group_norm(x, 2),
    "softmax": lambda x, y, w: x.softmax(1),
    "centred": lambda x, y, w: x - x.mean(1, keepdim=True),
    "running": lambda x, y, w: x.cumsum(1),
    "mirrored": lambda x, y, w: x.flip(1),
    "rolled": lambda x, y, w: x.roll(2, 1),
    "sorted": lambda x, y, w: x.sort(1).values,
    "top": lambda x, y, w: x.topk(WIDTH, 1).values,
    "where": lambda x, y, w: torch.where(x > w[0, 1], x, y),
    "filled": lambda x, y, w: x.masked_fill(y > 0, 0.5),
    "heads": lambda x, y, w: x.view(len(x), 2, 3).transpose(1, 2).reshape(len(x), WIDTH),
    "flat": lambda x, y, w: x.reshape(-1, 3).relu().reshape(-1, WIDTH),
    "attention": lambda x, y, w: attention(x, y),
    "einsum": lambda x, y, w: torch.einsum("nd,nd,ne->ne", x, y, x) / 10,
    "joined": lambda x, y, w: torch.cat([x, y], 1)[:, ::2],
    "split": lambda x, y, w: torch.cat(x.split(1, 0), 0),
    "scattered": lambda x, y, w: torch.zeros_like(x).scatter_add(1, (y.abs() * 2).long().clamp(0, 5), x),
    "put": lambda x, y, w: x.clone().index_put_((torch.arange(len(x), device=x.device),), y),
    "scaled": lambda x, y, w: x / (x.abs().amax(1, keepdim=True) + 1e-3),
    "pooled": lambda x, y, w: F.avg_pool1d(x[:, None], 3, 1, 1)[:, 0],
    "transposed": lambda x, y, w: x.T.contiguous().T,
    "places": lambda x, y, w: x + column(torch.arange(len(x)), x) * 0.1,
}
OF_BATCHES = {
    "softmax of columns": lambda x, y, w: x.softmax(0),
    "centred columns": lambda x, y, w: x - x.mean(0),
    "sum so far": lambda x, y, w: x.cumsum(0) / 4,
    "upside down": lambda x, y, w: x.flip(0),
    "next row": lambda x, y, w: x.roll(1, 0),
    "sorted columns": lambda x, y, w: x.sort(0).values,
    "last row": lambda x, y, w: x + x[-1:],
    "first row": lambda x, y, w: x - x[:1],
    "largest": lambda x, y, w: x - x.amax(0),
    "smallest": lambda x, y, w: x - x.min(),
    "whole norm": lambda x, y, w: x / (x.norm() + 1),
    "length": lambda x, y, w: x + x[:, :1] * len(x),
    "if long": lambda x, y, w: x * 2 if len(x) > 2 else x,
    "rows attend": lambda x, y, w: F.scaled_dot_product_attention(x[None], y[None], x[None])[0],
    "products of rows": lambda x, y, w: (x @ y.T) @ x / 10,
    "batch norm": lambda x, y, w: (x - x.mean(0)) / (x.std(0, unbiased=False) + 1),
    "evenly": lambda x, y, w: x + column(torch.linspace(0, 1, len(x)), x),
    "triangle": lambda x, y, w: torch.ones(len(x), len(x), device=x.device).tril() @ x / 4,
    "halves": lambda x, y, w: torch.cat([half.relu() for half in x.chunk(2, 0)], 0),
    "count": lambda x, y, w: x + (x > 0).sum(0) * 0.1,
    "total": lambda x, y, w: x + x.sum(0).tanh(),
    "scaled as one": lambda x, y, w: x / (x.abs().amax() + 1e-3),
    "differences": lambda x, y, w: F.pad(x.diff(dim=0), (0, 0, 1, 0)),
    "over rows": lambda x, y, w: F.avg_pool1d(x.T[None], 3, 1, 1)[0].T,
}


def program(seed, device):
    """Up to four operations, and their names."""
    choice = random.Random(seed)
    weights = randn(WIDTH, WIDTH, device=device, seed=seed) / 2
    of_all = [*OF_ROWS.items()] * 2 + [*OF_BATCHES.items()]
    picked = [(*choice.choice(of_all), choice.random() < 0.5) for _ in range(choice.randint(1, 4))]

    def run(x, y):
        for _, operation, swaps in picked:
            x, y = (operation(x, y, weights), x if swaps else y)
        return x

    return run, [name for name, _, _ in picked]


def check(seed, device):
    run, names = program(seed, device)
    f = graphed(run, ladder=LADDER, options=CaptureOptions(freeze_gc=False))
    for turn, rows in enumerate((3, 3, 1, 2, 5, 8, 7, 4)):
        x, y = (randn(rows, WIDTH, device=device, seed=1000 * seed + 2 * turn + at) for at in (0, 1))
        if seed % 3:  # all of one sign, which padding is not
            x, y = (x.abs() + 1, y.abs()) if seed % 3 == 1 else (-x.abs() - 2, y * 5)
        if turn == 6:
            x, y = -x, y * 10
        wanted = run(x.clone(), y.clone())
        got = f(x, y)
        assert torch.allclose(got, wanted, atol=1e-3, rtol=1e-3), (seed, names, rows, f.report().eager_steps)
    return f.report(), names


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(at, marks=pytest.mark.slow) for at in range(40, 1200, 40))]
)
def test_every_result_is_that_of_the_program(device, first):
    served = 0
    for seed in range(first, first + 40):
        report, names = check(seed, device)
        if set(names) <= OF_ROWS.keys() - {"places"}:
            assert report.replays == 8, names
        served += report.replays > 0
    assert 10 <= served < 40


def test_attention_without_dropout_hides_no_dependence_on_the_length(device):
    """To torch it is an operation that may draw random numbers, and such steps are not compared."""
    f = graphed(lambda x: attention(x, x) / len(x), ladder=LADDER)
    x = randn(3, WIDTH, device=device)
    assert torch.allclose(f(x), attention(x, x) / 3, atol=1e-5)
    assert f.report().graphs == ()


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of attention": lambda x: attention_with_dropout(x),
    "noise": lambda x: x + torch.randn_like(x),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "sampled": lambda x: torch.multinomial(x.softmax(1), 2).float(),
    "factors": lambda x: x * torch.rand(len(x), 1, device=x.device),
}


def attention_with_dropout(x):
    heads = x.view(-1, 1, 2, 3)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).reshape(-1, WIDTH)


@pytest.mark.parametrize("name", DRAWS)
def test_what_draws_is_served_unless_the_length_is_a_number_in_it(device, name):
    """Other sizes draw other numbers: they are compared with constants in their place."""
    draw, x = DRAWS[name], randn(3, WIDTH, device=device)
    for depends in (False, True):
        f = graphed(lambda x: draw(x) / (len(x) if depends else 4), ladder=LADDER)  # noqa: B023
        f(x)
        assert f.report().replays == (not depends), f.report().failures
