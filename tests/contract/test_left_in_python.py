"""What a step leaves in Python besides its results: a replay leaves the same, or there is no graph."""

from collections import defaultdict, deque
from typing import Any

import pytest
import torch
from torch import nn

from contract.steps import WIDTH, randn
from ostinato.graphs import eager_boundary, graphed


class Leaving(nn.Module):
    """Leaves something in `kept`."""

    def __init__(self, kept: Any, leave: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.kept, self.leave = nn.Linear(WIDTH, WIDTH), kept, leave

    def forward(self, x):
        y = self.linear(x)
        self.leave(self, y)
        return y


def count(m, y):
    m.kept += 1


def count_rows(m, y):
    m.kept += len(y)


def assign_rows(m, y):
    m.kept = len(y)


def append(m, y):
    m.kept.append(y.mean(-1))


def append_rows(m, y):
    m.kept.append(len(y))


def refill(m, y):
    m.kept.clear()
    m.kept.append(y * 2)


def in_a_list_of_a_dictionary(m, y):
    m.kept["means"].append(y.mean(-1))


def only_at_some_sizes(m, y):
    if len(y) > 2:
        m.kept += 1


def bounded(m, y):
    m.kept.append(y.mean(-1))
    if len(m.kept) > 2:
        m.kept.pop(0)


WAYS = {
    "a count": (lambda: 0, count, True),
    "a count in halves": (lambda: 0.5, count, True),
    "rows counted": (lambda: 0, count_rows, False),
    "the last number of rows": (lambda: 0, assign_rows, False),
    "a list": (list, append, True),
    "the latest three": (lambda: deque(maxlen=3), append, True),
    "a list of numbers of rows": (list, append_rows, False),
    "a list that is filled anew": (list, refill, True),
    "lists by name": (lambda: defaultdict(list), in_a_list_of_a_dictionary, True),
    "a count at some sizes": (lambda: 0, only_at_some_sizes, False),
    "a list that the step keeps short": (list, bounded, False),
}


def shown(kept: Any) -> Any:
    return dict(kept) if isinstance(kept, dict) else list(kept) if isinstance(kept, deque) else kept


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("meanwhile", ["nothing", "replaced", "captured ahead"])
def test_what_a_step_leaves_is_there_after_every_call(device, way, meanwhile):
    make, leave, has_graph = WAYS[way]
    module, plain = Leaving(make(), leave).to(device), Leaving(make(), leave).to(device)
    f = graphed(module, ladder=[1, 2, 4])
    with torch.no_grad():
        if meanwhile == "captured ahead":
            f.capture(randn(3, WIDTH, device=device))
        for number, rows in enumerate((3, 4, 1, 2, 3)):
            if meanwhile == "replaced" and number == 3:
                module.kept, plain.kept = make(), make()
            x = randn(rows, WIDTH, device=device, seed=number)
            f(x)
            plain(x)
            torch.testing.assert_close(shown(module.kept), shown(plain.kept))
    needed = 2 if meanwhile == "replaced" else 4  # a container around another one is watched
    assert (f.graph_call.report().replays >= needed) == has_graph


def test_what_an_eager_boundary_leaves_is_left_once(device):
    """Replays call it, and may count what they like; the rest of the step is left by replays."""

    class Piecewise(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.inside, self.log, self.outside, self.latest = 0, [], 0, None

        @eager_boundary
        def attend(self, x):
            self.inside += 1
            self.log.append(1)
            return x * 2

        def forward(self, x):
            self.outside += 1
            y = self.attend(self.linear(x)) + 1
            self.latest = y * 3
            return y

    module = Piecewise().to(device)
    f = graphed(module, ladder=[1, 2, 4], mode="piecewise")
    with torch.no_grad():
        for number, rows in enumerate((3, 4, 1, 2), 1):
            y = f(randn(rows, WIDTH, device=device))
            assert (module.inside, len(module.log), module.outside) == (number,) * 3
            torch.testing.assert_close(module.latest, y * 3)
    assert f.graph_call.report().replays >= 3


def test_a_count_inside_and_outside_of_an_eager_boundary_is_right(device):
    counts = {"calls": 0}

    @eager_boundary
    def attend(x):
        counts["calls"] += 1
        return x * 2

    def step(x):
        counts["calls"] += 1
        return attend(x + 1)

    f = graphed(step, ladder=[1, 2, 4], mode="piecewise")
    for number, rows in enumerate((3, 4, 1), 1):
        f(randn(rows, WIDTH, device=device))
        assert counts["calls"] == 2 * number


def test_a_step_without_a_graph_says_where_and_what_to_write(device, caplog):
    f = graphed(Leaving(0, count_rows).to(device), ladder=[1, 2, 4])
    f(randn(3, WIDTH, device=device))
    [cause] = {*f.graph_call.report().failures.values()}
    assert "m.kept += len(y)" in cause
