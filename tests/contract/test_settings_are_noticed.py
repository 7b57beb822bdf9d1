"""Numbers and switches that a step reads in Python, wherever a program keeps them: a replay would go on with
what they were, so a change runs eagerly and is named. What no code reads costs no graph."""

import argparse
import contextvars
import cProfile
import enum
import functools
import os
import sys
import types
import weakref
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from contract.steps import WIDTH, randn, reasons, same, wrap
from ostinato.graphs import graphed_train_step

LADDER = [1, 2, 4]
IN_CONTEXT = contextvars.ContextVar("IN_CONTEXT", default=2.0)


class Scaling(nn.Module):
    """Twice its input, in a way that a subclass says, until something is changed."""

    def change(self):
        raise NotImplementedError


class Attribute(Scaling):
    def __init__(self):
        super().__init__()
        self.scale = 2.0

    def forward(self, x):
        return x * self.scale

    def change(self):
        self.scale = 3.0


class BehindAProperty(Attribute):
    @property
    def factor(self):
        return self.scale

    def forward(self, x):
        return x * self.factor


class AskedForByName(Attribute):
    which = "scale"

    def forward(self, x):
        return x * getattr(self, self.which)


class OfTheClass(Scaling):
    scale = 2.0

    def forward(self, x):
        return x * self.scale

    def change(self):
        type(self).scale = 3.0


class ShadowingTheClass(OfTheClass):
    def change(self):
        self.scale = 3.0


class InAClassMethod(OfTheClass):
    @classmethod
    def factor(cls):
        return cls.scale

    def forward(self, x):
        return x * self.factor()


class AsAMethodOfTheClass(Scaling):
    def factor(self):
        return 2.0

    def forward(self, x):
        return x * self.factor()

    def change(self):
        type(self).factor = lambda self: 3.0


class NewAttribute(Scaling):
    def forward(self, x):
        return x * (self.scale if hasattr(self, "scale") else 2.0)

    def change(self):
        self.scale = 3.0


class NewEntry(Scaling):
    def __init__(self):
        super().__init__()
        self.settings = {}

    def forward(self, x):
        return x * self.settings.get("scale", 2.0)

    def change(self):
        self.settings["scale"] = 3.0


class Appended(Scaling):
    def __init__(self):
        super().__init__()
        self.scales = [1.0, 2.0]

    def forward(self, x):
        return functools.reduce(lambda y, scale: y * scale, self.scales, x)

    def change(self):
        self.scales.append(1.5)


class InASet(Scaling):
    def __init__(self):
        super().__init__()
        self.flags = {"twice"}

    def forward(self, x):
        return x * (3.0 if "thrice" in self.flags else 2.0)

    def change(self):
        self.flags.add("thrice")


class TakenFromASet(InASet):
    def forward(self, x):
        return x * (2.0 if "twice" in self.flags else 3.0)

    def change(self):
        self.flags.remove("twice")


class OneAttributeOfTwoNames(Scaling):
    """The name by which it is found first is one that no code mentions."""

    def __init__(self):
        super().__init__()
        self.a_first, self.settings = [{"scale": 2.0}] * 2

    def forward(self, x):
        return x * self.settings["scale"]

    def change(self):
        self.a_first["scale"] = 3.0


class OfAnAttribute:
    """A descriptor: what it reads stands in another attribute."""

    def __get__(self, owner, kind):
        return owner.inside


class BehindADescriptor(Scaling):
    factor = OfAnAttribute()

    def __init__(self):
        super().__init__()
        self.inside = 2.0

    def forward(self, x):
        return x * self.factor

    def change(self):
        self.inside = 3.0


def scaled(x):
    return x * scaled.scale


class OnAFunction(Scaling):
    def __init__(self):
        super().__init__()
        scaled.scale = 2.0

    def forward(self, x):
        return scaled(x)

    def change(self):
        scaled.scale = 3.0


class InAnArray(Scaling):
    def __init__(self):
        super().__init__()
        self.scales = np.array([1.0, 2.0])

    def forward(self, x):
        return x * float(self.scales[1])

    def change(self):
        self.scales[1] = 3.0


class OfAnOptimizer(Scaling):
    """Nobody reads torch's code, but what this one asks for counts."""

    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.SGD([torch.zeros(1)], lr=2.0)

    def forward(self, x):
        return x * self.optimizer.param_groups[0]["lr"]

    def change(self):
        self.optimizer.param_groups[0]["lr"] = 3.0


class OfAScheduler(OfAnOptimizer):
    def __init__(self):
        super().__init__()
        self.scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)

    def forward(self, x):
        return x * (2.0 + self.scheduler.last_epoch)

    def change(self):
        self.optimizer.step()
        self.scheduler.step()


class AskedOfAScheduler(OfAScheduler):
    def __init__(self):
        super().__init__()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 1 + epoch / 2)

    def forward(self, x):
        return x * self.scheduler.get_last_lr()[0]


class Plain:
    scale: float = 2.0


@dataclass(slots=True)
class Record:
    scale: float = 2.0


class Sub(nn.Dropout):
    """Code of torch's own reads its `p`."""


@pytest.mark.parametrize(
    "holder",
    [
        Plain,
        Record,
        lambda: types.SimpleNamespace(scale=2.0),
        lambda: argparse.Namespace(scale=2.0),
        lambda: OrderedDict(scale=2.0),
        lambda: defaultdict(lambda: 2.0),
        lambda: deque([2.0]),
        lambda: {"inside": [({"scale": 2.0},)]},
        lambda: UserDict(scale=2.0),
        lambda: ChainMap({}, {"scale": 2.0}),
    ],
    ids=[
        "object",
        "slots",
        "namespace",
        "arguments",
        "ordered",
        "default",
        "deque",
        "nested",
        "user",
        "chain",
    ],
)
def test_a_number_in_any_kind_of_holder(device, holder):
    class Held(Scaling):
        def __init__(self):
            super().__init__()
            self.holder = holder()

        def forward(self, x):
            return x * self.number(self.holder)

        def number(self, holder):
            if isinstance(holder, deque):
                return holder[0]
            inside = holder["inside"][0][0] if isinstance(holder, dict) and "inside" in holder else holder
            return inside["scale"] if isinstance(inside, Mapping) else inside.scale

        def change(self):
            if isinstance(self.holder, deque):
                self.holder[0] = 3.0
            elif isinstance(self.holder, Mapping):
                inside = self.holder["inside"][0][0] if "inside" in self.holder else self.holder
                inside["scale"] = 3.0
            else:
                self.holder.scale = 3.0

    check(device, Held())


@pytest.mark.parametrize(
    "kind",
    [
        Attribute,
        BehindAProperty,
        AskedForByName,
        OfTheClass,
        ShadowingTheClass,
        InAClassMethod,
        AsAMethodOfTheClass,
        NewAttribute,
        NewEntry,
        Appended,
        InASet,
        TakenFromASet,
        OneAttributeOfTwoNames,
        BehindADescriptor,
        OnAFunction,
        InAnArray,
        OfAnOptimizer,
        OfAScheduler,
        AskedOfAScheduler,
    ],
)
def test_a_number_that_a_module_keeps(device, kind):
    check(device, type(kind.__name__, (kind,), {"__module__": __name__})())


def check(device, module, changed=3.0):
    f, x = wrap(module, LADDER), randn(3, WIDTH, device=device)
    assert same(f(x).clone(), x * 2)
    assert same(f(x).clone(), x * 2)
    assert (reasons(f), f.report().replays) == ({}, 2)
    module.change()
    for calls in (1, 2):
        assert same(f(x), x * changed)
        assert reasons(f) == {"attribute-changed": calls}
    f.recapture()
    assert same(f(x).clone(), x * changed)
    assert f.report().replays == 1


def test_a_number_behind_a_weak_reference(device):
    parent = Attribute()
    reference = weakref.ref(parent)
    f, x = wrap(lambda x: x * reference().scale, LADDER), randn(3, WIDTH, device=device)
    assert same(f(x).clone(), x * 2)
    parent.change()
    assert same(f(x), x * 3)
    assert reasons(f) == {"attribute-changed": 1}


def test_a_setting_that_torchs_own_code_reads_in_a_subclass(device):
    module = Sub(0.0).to(device).train()
    f, x = wrap(module, LADDER), randn(3, WIDTH, device=device)
    assert same(f(x), x)
    module.p = 1.0
    assert same(f(x), x * 0)


def test_a_setting_of_a_transformers_model(device):
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaModel(config).to(device).eval()
    f, ids = wrap(model, LADDER), torch.ones(2, 3, dtype=torch.int64, device=device)
    assert f(ids, use_cache=False).hidden_states is None
    model.config.output_hidden_states = True
    assert len(f(ids, use_cache=False).hidden_states) == 2


# -- modules of Python -----------------------------------------------------------------------------------


@pytest.fixture
def package(monkeypatch):
    """`layers` and `settings` of a user's package; the one looks into the other."""
    modules = {name: types.ModuleType(name) for name in ("mine", "mine.settings", "mine.layers")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            setattr(modules["mine"], name.partition(".")[2], module)
    settings, layers = modules["mine.settings"], modules["mine.layers"]
    settings.SCALE, settings.OPTIONS, layers.settings, layers.GAIN = 2.0, {"scale": 2.0}, settings, 2.0
    exec(
        "class Options:\n    scale = 2.0\n"
        "def of_settings(x): return x * settings.SCALE\n"
        "def of_options(x): return x * settings.OPTIONS['scale']\n"
        "def of_its_own(x): return x * GAIN\n"
        "def of_a_class(x): return x * Options.scale\n"
        "def imported(x):\n    from mine.settings import SCALE\n    return x * SCALE\n",
        vars(layers),
    )
    return modules["mine"]


def set_own(package):
    package.layers.GAIN = 3.0


def set_setting(package):
    package.settings.SCALE = 3.0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("of_settings", set_setting),
        ("imported", set_setting),
        ("of_options", lambda package: package.settings.OPTIONS.update(scale=3.0)),
        ("of_its_own", set_own),
        ("of_a_class", lambda package: setattr(package.layers.Options, "scale", 3.0)),
        ("of_its_own", lambda package: setattr(package.layers, "of_its_own", lambda x: x * 3.0)),
    ],
    ids=["of another module", "imported in the call", "in a dictionary", "own", "of a class", "the function"],
)
def test_a_number_of_a_python_module(device, package, name, change):
    module = Scaling()
    module.forward = lambda x: getattr(package.layers, name)(x)
    module.change = lambda: change(package)
    if name == "of_its_own":  # by a name that is written down
        module.forward = lambda x: package.layers.of_its_own(x)
    else:
        function = getattr(package.layers, name)
        module.forward = lambda x: function(x)
    check(device, module)


def test_what_is_in_force_around_a_call(device):
    f, x = wrap(lambda x: x * IN_CONTEXT.get(), LADDER), randn(3, WIDTH, device=device)
    assert same(f(x).clone(), x * 2)
    token = IN_CONTEXT.set(3.0)
    assert same(f(x), x * 3)
    IN_CONTEXT.reset(token)
    assert same(f(x).clone(), x * 2)
    assert (reasons(f), f.report().replays) == ({"attribute-changed": 1}, 2)


def test_a_function_behind_a_cache(device, package):
    package.layers.cached = functools.lru_cache(lambda: 2.0 * package.settings.SCALE / 2.0)
    f, x = wrap(lambda x: x * package.layers.cached(), LADDER), randn(3, WIDTH, device=device)
    assert same(f(x).clone(), x * 2)
    package.settings.SCALE = 3.0
    package.layers.cached.cache_clear()
    assert same(f(x), x * 3)


# -- what costs no graph -----------------------------------------------------------------------------


class Mode(enum.Enum):
    FAST = 1


class Noted(nn.Module):
    """Much of it is for others than its code."""

    made = 0

    def __init__(self):
        super().__init__()
        type(self).made += 1
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.epoch, self.name, self.losses, self.config = 0, "run 1", [], {"lr": 0.1, "tags": {"a"}}
        self.mode = Mode.FAST
        self.memo, self.curve = {}, np.zeros(4)
        self.optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)

    def forward(self, x):
        if len(x) not in self.memo:
            self.memo[len(x)] = self.mode is Mode.FAST
        return self.linear(x) if self.memo[len(x)] else x


def test_what_no_code_reads_may_change(device):
    module = Noted().to(device)
    f, x = wrap(module, LADDER), randn(3, WIDTH, device=device)
    f(x)
    for number in range(4):
        module.epoch += 1
        module.name = f"run {number}"
        module.losses.append(0.5)
        module.config["lr"] /= 2
        module.config["tags"].add(number)
        module.config[number] = "new"
        module.curve[number] = 1.0
        module.optimizer.param_groups[0]["lr"] /= 2
        module.new_note = number
        Noted()
        with torch.no_grad():
            module(randn(5 + number, WIDTH, device=device))  # its memo grows in calls of its own
            assert torch.allclose(f(x), module(x), atol=1e-5)
    assert (reasons(f), f.report().replays) == ({}, 5)


def test_a_module_of_python_that_the_step_counts_in(device, package):
    def step(x):
        package.settings.SCALE += 0.0
        package.settings.calls = getattr(package.settings, "calls", 0) + 1
        return x * 2

    f, x = wrap(step, LADDER), randn(3, WIDTH, device=device)
    for _ in range(3):
        assert same(f(x), x * 2)
    assert (reasons(f), f.report().replays) == ({}, 3)


def scale_name():
    return "_".join(("GRAPHS", "SCALE"))


ENVIRONMENT = {
    "getenv": lambda: os.getenv("GRAPHS_SCALE", "2"),
    "get": lambda: os.environ.get("GRAPHS_SCALE", "2"),
    "in": lambda: os.environ["GRAPHS_SCALE"] if "GRAPHS_SCALE" in os.environ else "2",  # noqa: SIM401
    "made-up name": lambda: os.environ.get(scale_name(), "2"),
    "bytes": lambda: os.environb.get(b"GRAPHS_SCALE", b"2").decode(),
    "all": lambda: dict(os.environ).get("GRAPHS_SCALE", "2"),
}


@pytest.mark.parametrize("was", [None, "3"])
@pytest.mark.parametrize("read", ENVIRONMENT)
def test_an_environment_variable(device, monkeypatch, read, was):
    monkeypatch.delenv("GRAPHS_SCALE", raising=False)
    if was is not None:
        monkeypatch.setenv("GRAPHS_SCALE", was)
    f = wrap(lambda x: x * float(ENVIRONMENT[read]()), [2, 4])
    x = randn(3, WIDTH, device=device)
    assert same(f(x), x * float(was or 2))
    monkeypatch.setenv("GRAPHS_SCALE", "5")
    assert same(f(x), x * 5)
    assert reasons(f) == {"attribute-changed": 1}
    f.recapture()
    assert same(f(x), x * 5)
    monkeypatch.setenv("GRAPHS_SCALE", "5")
    assert same(f(x), x * 5)
    monkeypatch.delenv("GRAPHS_SCALE")
    assert same(f(x), x * 2)
    assert reasons(f) == {"attribute-changed": 2}
    if read != "all":
        monkeypatch.setenv("GRAPHS_SCALE", "5")
        monkeypatch.setenv("GRAPHS_OTHER", "1")
        assert same(f(x), x * 5)
        assert reasons(f) == {"attribute-changed": 2}


def test_an_environment_variable_while_a_profiler_looks(device, monkeypatch):
    monkeypatch.delenv("GRAPHS_SCALE", raising=False)
    f = wrap(lambda x: x * float(os.getenv("GRAPHS_SCALE", "2")), [2, 4])
    x = randn(3, WIDTH, device=device)
    with cProfile.Profile():
        assert same(f(x), x * 2)
    assert not reasons(f)
    monkeypatch.setenv("GRAPHS_SCALE", "5")
    assert same(f(x), x * 5)


def test_an_environment_variable_in_training(device, monkeypatch):
    monkeypatch.setenv("GRAPHS_SCALE", "2")
    weights = [torch.nn.Parameter(torch.ones(WIDTH, device=device)) for _ in range(2)]

    class Scaled(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            return x * self.weight * float(os.environ["GRAPHS_SCALE"])

    models = [Scaled(weight) for weight in weights]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    step = graphed_train_step(models[0], torch.nn.functional.mse_loss, optimizers[0])
    for scale in ("2", "2", "3", "3", "2"):
        monkeypatch.setenv("GRAPHS_SCALE", scale)
        x, y = randn(4, WIDTH, device=device), randn(4, WIDTH, device=device, seed=1)
        loss = step(x, y)
        optimizers[1].zero_grad()
        wanted = torch.nn.functional.mse_loss(models[1](x), y)
        wanted.backward()
        optimizers[1].step()
        assert torch.allclose(loss, wanted)
    assert torch.allclose(*weights)
