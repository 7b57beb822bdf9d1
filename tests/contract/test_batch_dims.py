"""Arguments and outputs whose rows are counted in different dimensions."""

import pytest
import torch
from torch import nn

from contract.steps import WIDTH, close, randn, reasons, same, wrap
from ostinato.graphs import BatchError, ConfigError


class Recurrent(nn.Module):
    """States are [layers, n, width], inputs [n, length, width]."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x, state):
        rows = x
        after = []
        for cell, before in zip(self.cells, state.unbind(0), strict=True):
            rows = cell(rows, before)
            after.append(rows)
        return rows, torch.stack(after)


def test_a_recurrent_state_has_its_batch_in_the_second_dimension(device):
    model = Recurrent().to(device).eval()
    f = wrap(model, [1, 2, 4], batch_dim={"state": 1, "x": 0})
    with torch.no_grad():
        for n in (3, 4, 1, 2):
            state = eager = torch.zeros(3, n, WIDTH, device=device)
            for step in range(3):
                x = randn(n, WIDTH, device=device, seed=step)
                y, state = f(x, state)
                wanted, eager = model(x, eager)
                assert close(y, wanted)
                assert close(state, eager)
                assert state.is_contiguous()
    assert reasons(f) == {}
    f.verify()


def test_torchs_own_recurrent_layers(device):
    model = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True).to(device).eval()
    f = wrap(model, [2, 4], batch_dim={"hx": 1})
    with torch.no_grad():
        for n in (3, 2, 4):
            hx = tuple(randn(2, n, WIDTH, device=device, seed=seed) for seed in (1, 2))
            x = randn(n, 5, WIDTH, device=device)
            assert close(f(x, hx), model(x, hx))
    assert reasons(f) == {}


def test_arguments_that_are_not_named_have_it_first(device):
    f = wrap(lambda x, y, table: (x + y.t(), y * 2 + table), batch_dim={"y": 1}, shared=["table"])
    table = randn(WIDTH, 1, device=device, seed=3)
    for n in (3, 4, 1):
        x, y = randn(n, WIDTH, device=device), randn(WIDTH, n, device=device, seed=1)
        assert same(f(x, y, table=table), (x + y.t(), y * 2 + table))
        assert same(f(x, table=table, y=y), (x + y.t(), y * 2 + table))
    assert reasons(f) == {"unseen-signature": 3}


def test_a_state_that_is_written_in_place(device):
    def step(x, state):
        state[0].add_(x)
        return state.sum(0)

    f = wrap(step, batch_dim={"state": 1})
    for n in (3, 4):
        x, state = randn(n, WIDTH, device=device), randn(2, n, WIDTH, device=device, seed=1)
        wanted = state.clone()
        assert close(f(x, state), step(x, wanted))
        assert same(state, wanted)
    assert reasons(f) == {}


def test_dimensions_that_do_not_exist_are_refused_by_name(device):
    x = randn(3, WIDTH, device=device)
    with pytest.raises(ConfigError, match="'y'"):
        wrap(lambda x: x, batch_dim={"y": 1})(x)
    with pytest.raises(ConfigError, match="x has dimension 2"):
        wrap(lambda x: x, batch_dim={"x": 2})(x)
    with pytest.raises(ConfigError, match="shared"):
        wrap(lambda x, t: x, batch_dim={"t": 1}, shared=["t"])
    f = wrap(lambda x, y: x + y.t(), batch_dim={"y": 1})
    with pytest.raises(BatchError, match=r"y has a batch of 2.*has one of 3"):
        f(x, randn(WIDTH, 2, device=device))
