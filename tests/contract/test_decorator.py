"""`@graphed(...)` on functions and methods: graphs for each object, and the metadata of the function."""

import copy
import inspect
import pickle

import pytest
import torch

from contract.steps import WIDTH, close, randn, reasons, same
from ostinato.graphs import CaptureOptions, ConfigError, GraphPool, graphed

LADDER = [2, 4]
QUICK = CaptureOptions(freeze_gc=False)


@graphed(ladder=LADDER, options=QUICK)
def scaled(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    """A factor times x."""
    return x * factor


class Scale:
    def __init__(self, factor):
        self.factor = factor

    @graphed(ladder=LADDER, options=QUICK)
    def apply(self, x):
        """The object's factor times x."""
        return x * self.factor


class Twice(Scale):
    @graphed(ladder=LADDER, options=QUICK)
    def apply(self, x):
        return super().apply(x) * 2


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    @graphed(ladder=LADDER, options=QUICK)
    def forward(self, x):
        return torch.tanh(self.layer(x))


def test_a_decorated_function_is_served_and_keeps_its_name(device):
    for n in (3, 4):
        x = randn(n, WIDTH, device=device)
        assert same(scaled(x), x * 2)
    assert reasons(scaled) == {}
    assert (scaled.__name__, scaled.__doc__) == ("scaled", "A factor times x.")
    assert list(inspect.signature(scaled).parameters) == ["x", "factor"]


def test_every_object_has_graphs_of_its_own(device):
    x = randn(3, WIDTH, device=device)
    two, three = Scale(2.0), Scale(3.0)
    for _ in range(3):
        assert same(two.apply(x), x * 2)
        assert same(three.apply(x), x * 3)
    assert two.apply.report().replays == three.apply.report().replays == 3
    assert two.apply is two.apply
    assert two.apply.__doc__ == "The object's factor times x."


def test_a_method_that_calls_the_decorated_one_of_its_base_is_right(device):
    x = randn(3, WIDTH, device=device)
    twice = Twice(3.0)
    for _ in range(2):
        assert same(twice.apply(x), x * 3 * 2)
    assert twice.apply.report().replays == 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
@pytest.mark.parametrize("kind", [Scale, Twice])
def test_a_copy_of_an_object_is_served_by_its_own_values(device, copied, kind):
    x = randn(3, WIDTH, device=device)
    first = kind(2.0)
    wanted = first.apply(x)
    second = copied(first)
    second.factor = 5.0
    assert close(second.apply(x), wanted * 2.5)
    assert same(first.apply(x), wanted)


@pytest.mark.parametrize("copied", [lambda it: it, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_modules_forward_may_be_decorated(device, copied):
    net = Net().to(device).eval()
    with torch.no_grad():
        net(randn(3, WIDTH, device=device))
        net = copied(net)
        for n in (3, 2):
            x = randn(n, WIDTH, device=device)
            assert close(net(x), torch.tanh(net.layer(x)))
    assert net.forward.report().replays >= 2
    assert set(net.state_dict()) == {"layer.weight", "layer.bias"}


def test_static_and_class_methods_may_be_decorated_on_either_side(device):
    class Box:
        factor = 2.0

        @staticmethod
        @graphed(ladder=LADDER, options=QUICK)
        def inner(x):
            return x + 1

        @graphed(ladder=LADDER, options=QUICK)
        @staticmethod
        def outer(x):
            return x + 2

        @graphed(ladder=LADDER, options=QUICK)
        @classmethod
        def of_class(cls, x):
            return x * cls.factor

        @classmethod
        @graphed(ladder=LADDER, options=QUICK)
        def of_class_inside(cls, x):
            return x * cls.factor

    class Other(Box):
        factor = 3.0

    x = randn(3, WIDTH, device=device)
    for _ in range(2):
        for box in (Box, Box()):
            assert same(box.inner(x), x + 1)
            assert same(box.outer(x), x + 2)
            assert same(box.of_class(x), x * 2)
            assert same(box.of_class_inside(x), x * 2)
        assert same(Other.of_class(x), x * 3)
        assert same(Other.of_class_inside(x), x * 3)


def test_a_pool_that_a_decorated_method_is_given_is_used(device):
    pool = GraphPool(device)

    class Box:
        @graphed(ladder=LADDER, options=QUICK, pool=pool)
        def apply(self, x):
            return torch.tanh(x) * 2

    box = Box()
    box.apply(randn(3, WIDTH, device=device))
    assert len(pool.graphs) == len(LADDER)


def test_an_attribute_that_a_decorated_method_reads_is_noticed(device):
    x, scale = randn(3, WIDTH, device=device), Scale(2.0)
    assert same(scale.apply(x), x * 2)
    scale.factor = 7.0
    assert same(scale.apply(x), x * 7)
    assert reasons(scale.apply) == {"attribute-changed": 1}


def test_what_cannot_be_wrapped_is_refused_by_name(device):
    async def answer(x):
        return x

    with pytest.raises(ConfigError, match=r"answer.*coroutine"):
        graphed(ladder=LADDER)(answer)
    with pytest.raises(ConfigError, match="Scale is a class"):
        graphed(ladder=LADDER)(Scale)
    with pytest.raises(ConfigError, match="not a int"):
        graphed(ladder=LADDER)(3)
    with pytest.raises(ConfigError, match="batch_dim"):
        graphed(ladder=LADDER, batch_dim={"x": -1})
