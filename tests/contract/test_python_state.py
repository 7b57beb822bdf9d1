"""What Python code may read, by kind: a change after the capture is noticed, or the step is refused from the
start; what a step takes or counts is taken and counted as in eager calls. Never a wrong number."""

import argparse
import array
import collections
import ctypes
import functools
import io
import itertools
import logging
import multiprocessing
import queue
import random
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import shared_memory
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from contract.steps import WIDTH, randn, reasons, same, wrap
from ostinato.graphs import AddressError, graphed_train_step

LADDER = [1, 2, 4]
NUMBER = 2.0
SETTINGS = {"scale": 2.0}


class Held(nn.Module):
    """Multiplies by what `read` finds in what it holds."""

    def __init__(self, holder: Any, read: Callable[[Any], float], change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.holder, self.read, self._change = holder, read, change

    def forward(self, x):
        return x * float(self.read(self.holder))

    def change(self):
        self._change(self.holder)


class Slots:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 2.0


@dataclass
class Record:
    scale: float = 2.0
    more: list[float] = field(default_factory=lambda: [2.0])


class Meta(type):
    inside = 2.0

    @property
    def scale(cls):
        return cls.inside


def of_class(**entries: Any) -> type:
    return type("OfClass", (), {"__module__": __name__, **entries})


class AttrDict(dict):
    """Settings by name, as many projects write it."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Node:
    """Settings as omegaconf keeps them."""

    def __init__(self, **entries: Any) -> None:
        self.__dict__["_content"] = entries

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_content"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__["_content"][name] = value


class Chosen(Enum):
    A = 2.0
    B = 3.0


class Pair(NamedTuple):
    scale: float = 2.0


def with_default(scale=2.0):
    return scale


def with_keyword(*, scale=2.0):
    return scale


def closure_of(value):
    def get():
        return value

    def put(new):
        nonlocal value
        value = new

    get.put = put
    return get


def shared(number: float) -> shared_memory.SharedMemory:
    made = shared_memory.SharedMemory(create=True, size=8)
    made.buf[0] = int(number)
    made.unlink()
    return made


def logits_processor():
    from transformers import RepetitionPenaltyLogitsProcessor

    return RepetitionPenaltyLogitsProcessor(2.0)


def generation_config():
    from transformers import GenerationConfig

    return GenerationConfig(temperature=2.0)


def assign(name: str, value: Any = 3.0) -> Callable[[Any], None]:
    return lambda holder: setattr(holder, name, value)


def put(key: Any, value: Any = 3.0) -> Callable[[Any], None]:
    return lambda holder: holder.__setitem__(key, value)


SCALE = lambda holder: holder.scale  # noqa: E731
ENTRY = lambda holder: holder["scale"]  # noqa: E731
FIRST = lambda holder: holder[0]  # noqa: E731

LOOKED_AT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "an object": (lambda: of_class(scale=2.0)(), SCALE, assign("scale")),
    "an object with slots": (Slots, SCALE, assign("scale")),
    "a dataclass": (Record, SCALE, assign("scale")),
    "a list in a dataclass": (Record, lambda r: r.more[0], lambda r: r.more.__setitem__(0, 3.0)),
    "a frozen dataclass replaced": (lambda: [Pair()], lambda h: h[0].scale, put(0, Pair(3.0))),
    "a namespace": (lambda: types.SimpleNamespace(scale=2.0), SCALE, assign("scale")),
    "a namespace in a namespace": (
        lambda: types.SimpleNamespace(a=types.SimpleNamespace(scale=2.0)),
        lambda h: h.a.scale,
        lambda h: setattr(h.a, "scale", 3.0),
    ),
    "arguments of a program": (lambda: argparse.Namespace(scale=2.0), SCALE, assign("scale")),
    "a dictionary with attributes": (lambda: AttrDict(scale=2.0), SCALE, assign("scale")),
    "settings behind __getattr__": (lambda: Node(scale=2.0), SCALE, assign("scale")),
    "settings in settings": (
        lambda: Node(inner=Node(scale=2.0)),
        lambda h: h.inner.scale,
        lambda h: setattr(h.inner, "scale", 3.0),
    ),
    "a class": (lambda: of_class(scale=2.0), SCALE, assign("scale")),
    "a property of a metaclass": (lambda: Meta("C", (), {}), SCALE, assign("inside")),
    "an attribute of a metaclass": (
        lambda: type("Own", (Meta,), {"__module__": __name__, "at": 2.0})("C", (), {}),
        lambda c: type(c).at,
        lambda c: setattr(type(c), "at", 3.0),
    ),
    "a class method": (
        lambda: of_class(at=2.0, get=classmethod(lambda cls: cls.at)),
        lambda c: c.get(),
        assign("at"),
    ),
    "a dictionary": (lambda: {"scale": 2.0}, ENTRY, put("scale")),
    "a large dictionary": (lambda: {"scale": 2.0, **dict.fromkeys(range(5000), 1.0)}, ENTRY, put("scale")),
    "a dictionary grown": (
        lambda: dict.fromkeys(range(1000), 1.0),
        lambda h: h.get("scale", 2.0),
        put("scale"),
    ),
    "an ordered dictionary": (lambda: collections.OrderedDict(scale=2.0), ENTRY, put("scale")),
    "a default dictionary": (lambda: collections.defaultdict(lambda: 2.0), ENTRY, put("scale")),
    "a counter": (lambda: collections.Counter(scale=2), ENTRY, put("scale", 3)),
    "a chain of dictionaries": (lambda: collections.ChainMap({}, {"scale": 2.0}), ENTRY, put("scale")),
    "a user dictionary": (lambda: collections.UserDict(scale=2.0), ENTRY, put("scale")),
    "a view of a dictionary": (
        lambda: (under := {"scale": 2.0}, types.MappingProxyType(under)),
        lambda h: h[1]["scale"],
        lambda h: h[0].update(scale=3.0),
    ),
    "values of a dictionary": (
        lambda: (under := {"scale": 2.0}, under.values()),
        lambda h: sum(h[1]),
        lambda h: h[0].update(scale=3.0),
    ),
    "a list": (lambda: [2.0], FIRST, put(0)),
    "a list in a tuple": (lambda: ([2.0],), lambda h: h[0][0], lambda h: h[0].__setitem__(0, 3.0)),
    "a large list": (lambda: [2.0] * 3000, lambda h: h[2999], put(2999)),
    "a large list grown": (lambda: [0.0] * 2000, lambda h: len(h) / 1000, lambda h: h.extend([0.0] * 1000)),
    "a minus before a zero": (
        lambda: [0.0],
        lambda h: 2.0 if str(h[0]) == "0.0" else 3.0,
        put(0, -0.0),
    ),
    "a deque": (lambda: collections.deque([2.0]), FIRST, put(0)),
    "a large deque": (lambda: collections.deque([2.0] * 300), FIRST, put(0)),
    "a set": (lambda: {1}, lambda h: 3.0 if 2 in h else 2.0, lambda h: h.add(2)),
    "a large set": (lambda: set(range(999)), lambda h: 3.0 if -1 in h else 2.0, lambda h: h.add(-1)),
    "a set emptied": (lambda: {1}, lambda h: 2.0 if 1 in h else 3.0, lambda h: h.clear()),
    "an array of NumPy": (lambda: np.array([2.0]), FIRST, put(0)),
    "a large array of NumPy": (lambda: np.full(10_000, 2.0), lambda h: h[9999], put(9999)),
    "a view of an array": (
        lambda: (whole := np.full(8, 2.0), whole[::2]),
        lambda h: h[1][0],
        lambda h: h[0].fill(3.0),
    ),
    "an array of objects": (lambda: np.array([2.0, None], dtype=object), FIRST, put(0)),
    "an array of Python": (lambda: array.array("d", [2.0] * 1000), FIRST, put(0)),
    "bytes": (lambda: bytearray([2]), FIRST, put(0, 3)),
    "a view of bytes": (lambda: memoryview(bytearray([2])), FIRST, put(0, 3)),
    "a number of C": (lambda: ctypes.c_double(2.0), lambda h: h.value, assign("value")),
    "an array of C": (lambda: (ctypes.c_double * 2)(2.0, 1.0), FIRST, put(0)),
    "a value of processes": (lambda: multiprocessing.Value("d", 2.0), lambda h: h.value, assign("value")),
    "an array of processes": (lambda: multiprocessing.Array("d", [2.0]), FIRST, put(0)),
    "shared memory": (lambda: shared(2.0), lambda h: h.buf[0], lambda h: h.buf.__setitem__(0, 3)),
    "a queue looked into": (
        lambda: queue.Queue(),
        lambda h: 2.0 + h.qsize(),
        lambda h: h.put(1),
    ),
    "an event": (threading.Event, lambda h: 3.0 if h.is_set() else 2.0, lambda h: h.set()),
    "what belongs to a thread": (
        lambda: threading.local(),
        lambda h: getattr(h, "scale", 2.0),
        assign("scale"),
    ),
    "a default": (
        lambda: types.FunctionType(with_default.__code__, globals(), "f", (2.0,)),
        lambda h: h(),
        assign("__defaults__", (3.0,)),
    ),
    "a keyword's default": (
        lambda: _with_keywords(2.0),
        lambda h: h(),
        assign("__kwdefaults__", {"scale": 3.0}),
    ),
    "a keyword's default changed": (
        lambda: _with_keywords(2.0),
        lambda h: h(),
        lambda h: h.__kwdefaults__.update(scale=3.0),
    ),
    "the code of a function": (
        lambda: types.FunctionType((lambda: 2.0).__code__, {}),
        lambda h: h(),
        assign("__code__", (lambda: 3.0).__code__),
    ),
    "a closure": (lambda: closure_of(2.0), lambda h: h(), lambda h: h.put(3.0)),
    "an attribute of a function": (
        lambda: _with_attribute(2.0),
        lambda h: h.scale,
        assign("scale"),
    ),
    "a partial's arguments": (
        lambda: functools.partial(lambda scale: scale, scale=2.0),
        lambda h: h(),
        lambda h: h.keywords.update(scale=3.0),
    ),
    "a method of an object": (
        lambda: of_class(at=2.0, get=lambda self: self.at)(),
        lambda h: h.get(),
        assign("at"),
    ),
    "a patched method": (
        lambda: of_class(get=lambda self: 2.0)(),
        lambda h: h.get(),
        assign("get", lambda: 3.0),
    ),
    "a property": (
        lambda: of_class(at=2.0, scale=property(lambda self: self.at))(),
        SCALE,
        assign("at"),
    ),
    "a cached property dropped": (
        lambda: _Cached(),
        SCALE,
        lambda h: (setattr(h, "at", 3.0), h.__dict__.pop("scale", None)),
    ),
    "__call__ of an object": (
        lambda: of_class(at=2.0, __call__=lambda self: self.at)(),
        lambda h: h(),
        assign("at"),
    ),
    "__getitem__ of an object": (
        lambda: of_class(at=2.0, __getitem__=lambda self, key: self.at)(),
        FIRST,
        assign("at"),
    ),
    "__len__ of an object": (
        lambda: of_class(at=2, __len__=lambda self: self.at)(),
        lambda h: len(h),
        assign("at", 3),
    ),
    "an object's class": (lambda: of_class(at=2.0)(), lambda h: h.at, assign("__class__", of_class(at=3.0))),
    "an object's dictionary": (
        lambda: of_class(at=1.0)(),
        lambda h: h.at * 2 if h.at == 1.0 else h.at,
        assign("__dict__", {"at": 3.0}),
    ),
    "a member of an enumeration": (lambda: [Chosen.A], lambda h: h[0].value, put(0, Chosen.B)),
    "an object that is nested": (
        lambda: {"a": [of_class(scale=2.0)()]},
        lambda h: h["a"][0].scale,
        lambda h: setattr(h["a"][0], "scale", 3.0),
    ),
    "a logits processor of transformers": (logits_processor, lambda h: h.penalty, assign("penalty")),
    "settings of transformers": (generation_config, lambda h: h.temperature, assign("temperature")),
    "a distribution of torch": (
        lambda: types.SimpleNamespace(of=torch.distributions.Normal(2.0, 1.0, validate_args=False)),
        lambda h: 2.0 if h.of.event_shape == () else 3.0,
        lambda h: setattr(h.of, "_event_shape", (1,)),
    ),
}


def _with_keywords(scale: float) -> Any:
    made = types.FunctionType(with_keyword.__code__, globals(), "f")
    made.__kwdefaults__ = {"scale": scale}
    return made


def _with_attribute(scale: float) -> Any:
    def function():
        return None

    function.scale = scale
    return function


class _Cached:
    def __init__(self):
        self.at = 2.0

    @functools.cached_property
    def scale(self):
        return self.at


@pytest.mark.parametrize("kind", LOOKED_AT)
def test_a_change_is_noticed_or_the_step_was_refused(device, kind):
    make, read, change = LOOKED_AT[kind]
    module = Held(make(), read, change)
    f, x = wrap(module, LADDER), randn(3, WIDTH, device=device)
    for _ in range(2):
        assert same(f(x).clone(), x * 2), "before"
    module.change()
    for _ in range(2):
        assert same(f(x).clone(), x * 3), reasons(f)


# -- what a step takes or counts itself ------------------------------------------------------------------


class Taking(nn.Module):
    """Multiplies by what it takes."""

    def __init__(self, holder: Any, take: Callable[[Any], float]) -> None:
        super().__init__()
        self.holder, self.take = holder, take

    def forward(self, x):
        return x * self.take(self.holder)


def filled(kind: Callable[[], Any]) -> Any:
    made = kind()
    for number in range(1, 60):
        made.put(float(number))
    return made


def file_of_numbers() -> io.StringIO:
    return io.StringIO("\n".join(map(str, range(1, 60))))


class Every:
    """Counts its calls."""

    def __init__(self):
        self.n = 0

    def __call__(self, period=3):
        self.n += 1
        return 2.0 if self.n % period == 0 else 1.0


class Own:
    """An iterator of the user's own."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return float(self.at)


TAKEN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "an iterator over a list": (lambda: iter([float(i) for i in range(1, 60)]), next),
    "a generator": (lambda: (float(i) for i in range(1, 60)), next),
    "a count": (lambda: itertools.count(1.0), next),
    "a cycle": (lambda: itertools.cycle([1.0, 2.0, 3.0]), next),
    "a zip": (lambda: zip(range(1, 60), range(60), strict=False), lambda it: float(next(it)[0])),
    "an enumeration": (lambda: enumerate(range(60), 1), lambda it: float(next(it)[0])),
    "a map": (lambda: map(float, range(1, 60)), next),
    "an iterator of the user's": (Own, next),
    "a reversed list": (lambda: reversed([float(i) for i in range(1, 60)]), next),
    "batches of a loader": (
        lambda: iter(torch.utils.data.DataLoader([float(i) for i in range(1, 60)], batch_size=None)),
        lambda it: float(next(it)),
    ),
    "a queue": (lambda: filled(queue.Queue), lambda q: q.get()),
    "a simple queue": (lambda: filled(queue.SimpleQueue), lambda q: q.get()),
    "a list popped": (lambda: [float(i) for i in range(60)], lambda h: h.pop()),
    "a deque rotated": (
        lambda: collections.deque([1.0, 2.0, 3.0]),
        lambda h: (h.rotate(1), h[0])[1],
    ),
    "a file": (file_of_numbers, lambda h: float(h.readline())),
    "a random generator of Python": (lambda: random.Random(0), lambda r: r.random()),
    "a random generator of NumPy": (lambda: np.random.default_rng(0), lambda r: float(r.random())),
    "a state of NumPy": (lambda: np.random.RandomState(0), lambda r: float(r.rand())),
    "every third": (Every, lambda h: h()),
    "every fiftieth": (Every, lambda h: h(50)),
    "a counter in a dictionary": (
        lambda: {"n": 0},
        lambda h: (h.update(n=h["n"] + 1), 2.0 if h["n"] % 50 == 0 else 1.0)[1],
    ),
    "a counter in a list": (
        lambda: [0],
        lambda h: (h.__setitem__(0, h[0] + 1), 2.0 if h[0] % 50 == 0 else 1.0)[1],
    ),
    "a counter in an array": (
        lambda: np.zeros(1, dtype=np.int64),
        lambda h: (h.__setitem__(0, h[0] + 1), 2.0 if h[0] % 50 == 0 else 1.0)[1],
    ),
    "a counter of processes": (
        lambda: multiprocessing.Value("i", 0),
        lambda h: (setattr(h, "value", h.value + 1), 2.0 if h.value % 50 == 0 else 1.0)[1],
    ),
    "a history that is counted": (
        list,
        lambda h: (h.append(1), 2.0 if len(h) % 50 == 0 else 1.0)[1],
    ),
    "a toggle": (
        lambda: types.SimpleNamespace(on=False),
        lambda h: (setattr(h, "on", not h.on), 2.0 if h.on else 1.0)[1],
    ),
    "a schedule that ends": (
        lambda: types.SimpleNamespace(step=0),
        lambda h: (setattr(h, "step", h.step + 1), min(1.0, h.step / 20))[1],
    ),
    "a schedule that begins": (
        lambda: types.SimpleNamespace(step=0),
        lambda h: (setattr(h, "step", h.step + 1), max(1.0, h.step / 20))[1],
    ),
}


@pytest.mark.parametrize("kind", TAKEN)
@pytest.mark.parametrize("ahead", [False, True], ids=["at the first call", "captured ahead"])
def test_what_a_step_takes_is_taken_once_in_each_call(device, kind, ahead):
    make, take = TAKEN[kind]
    f, twin = wrap(Taking(make(), take), LADDER), Taking(make(), take)
    x = randn(3, WIDTH, device=device)
    if ahead:
        f.capture(x)
    for number in range(55):
        assert same(f(x).clone(), twin(x)), (number, reasons(f))


# -- the same in training ------------------------------------------------------------------------------


class Weighing(nn.Module):
    """A loss function whose weight Python decides."""

    def __init__(self, holder: Any, take: Callable[[Any], float]) -> None:
        super().__init__()
        self.holder, self.take = holder, take

    def forward(self, outputs, targets):
        return ((outputs - targets) ** 2).mean() * self.take(self.holder)


IN_TRAINING = (
    *("an iterator over a list", "a generator", "a queue", "a file", "batches of a loader"),
    *("every fiftieth", "a counter in an array", "a schedule that begins", "a schedule that ends"),
    *("a random generator of Python", "a random generator of NumPy", "a toggle"),
)


@pytest.mark.parametrize("kind", IN_TRAINING)
def test_what_a_loss_takes_is_taken_once_in_each_step(device, kind):
    make, take = TAKEN[kind]

    def trained(step_of):
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, WIDTH).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        step = step_of(model, Weighing(make(), take), optimizer)
        x = randn(4, 6, WIDTH, device=device)
        return torch.stack([step(x, x * 2) for _ in range(52)])

    def eager(model, loss_fn, optimizer):
        def step(x, y):
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    got, wanted = trained(graphed_train_step), trained(eager)
    assert torch.allclose(got, wanted, rtol=1e-5), (got, wanted)


@pytest.mark.parametrize("spelling", ["in place", "spelt out", "of a class", "in a dictionary", "a list"])
def test_a_count_that_nobody_reads_costs_no_graph(device, spelling):
    class Counting(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.n, self.stats, self.seen = 0, {"made": 0}, []

        def forward(self, x):
            if spelling == "in place":
                self.n += 1
            elif spelling == "spelt out":
                self.n = self.n + 1
            elif spelling == "of a class":
                type(self).calls += 1
            elif spelling == "in a dictionary":
                self.stats["made"] += 1
            else:
                self.seen.append(1)
            return x * 2

    Counting.calls = 0
    module, x = Counting(), randn(3, WIDTH, device=device)
    f = wrap(module, LADDER)
    for _ in range(3):
        assert same(f(x).clone(), x * 2)
    assert (reasons(f), f.report().replays) == ({}, 3)
    assert module.n + Counting.calls + module.stats["made"] + len(module.seen) == 3


def test_what_only_python_uses_costs_no_graph(device):
    """A lock, a logger, a stream, a generator that no code of the step names."""

    class Busy(nn.Module):
        def __init__(self):
            super().__init__()
            self.lock, self.log, self.batches = threading.Lock(), logging.getLogger("busy"), iter([1, 2])
            self.memo = {}

        def forward(self, x):
            with self.lock:
                self.log.debug("called")
                if len(x) not in self.memo:
                    self.memo[len(x)] = 2.0
            return x * self.memo[len(x)]

    f, x = wrap(Busy(), LADDER), randn(3, WIDTH, device=device)
    for _ in range(3):
        assert same(f(x).clone(), x * 2)
    assert (reasons(f), f.report().replays) == ({}, 3)


NUMERICS = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "products of float32": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "medium",
    ),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    ),
}


@pytest.mark.parametrize("setting", NUMERICS)
def test_a_setting_of_torch_by_which_numbers_differ(device, setting):
    get, put_it, other = NUMERICS[setting]
    f, x = wrap(lambda x: x * 2, LADDER), randn(3, WIDTH, device=device)
    f(x)
    before = get()
    try:
        put_it(other)
        f(x)
    finally:
        put_it(before)
    assert reasons(f) == {"attribute-changed": 1}
    f(x)
    assert reasons(f) == {"attribute-changed": 1}


def test_pythons_own_random_numbers_are_drawn_once_in_each_call(device):
    def step(x):
        return x * random.random()

    x = randn(3, WIDTH, device=device)
    random.seed(5)
    wanted = [step(x) for _ in range(4)]
    random.seed(5)
    f = wrap(step, LADDER)
    assert all(same(f(x).clone(), one) for one in wanted)


# -- adapters ------------------------------------------------------------------------------------------


def adapted(device):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    config = LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    model = get_peft_model(model, config)
    model.add_adapter("other", config)
    return model.to(device).eval()


ADAPTERS = {
    "merge": lambda model: model.merge_adapter(),
    "another": lambda model: model.set_adapter("other"),
    "none": lambda model: model.base_model.disable_adapter_layers(),
    "its scale": lambda model: model.base_model.model[0].scaling.update(default=7.0),
    "set_scale": lambda model: model.base_model.model[0].set_scale("default", 5.0),
    "deleted": lambda model: model.delete_adapter("other"),
    "merged and unmerged": lambda model: (model.merge_adapter(), model.unmerge_adapter()),
}


@pytest.mark.parametrize("change", ADAPTERS)
def test_what_peft_does_to_its_adapters(device, change):
    model = adapted(device)
    f, x = wrap(model, LADDER), randn(4, WIDTH, device=device)
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(f(x), model(x), atol=1e-5)
        assert f.graph_call.report().replays >= 1 if hasattr(f, "graph_call") else f.report().replays >= 1
        ADAPTERS[change](model)
        for _ in range(2):
            try:
                got = f(x)
            except AddressError:  # weights were replaced, and it says so
                return
            assert torch.allclose(got, model(x), atol=1e-5)


def test_what_only_code_of_packages_that_did_not_run_reaches_costs_no_graph(device):
    """Packages around a model reach iterators, such as the count of file locks, that no step takes from."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, bos_token_id=0, eos_token_id=0)
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    model = get_peft_model(GPT2LMHeadModel(config), lora).to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    step = graphed_train_step(model, lambda out, labels: out.loss, optimizer)
    ids = torch.zeros(2, 4, dtype=torch.int64, device=device)
    for _ in range(3):
        step({"input_ids": ids, "labels": ids}, ids)
    assert step.report().replays == 2


class Timed(nn.Module):
    """Leaves how often it was called, and how long that took."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        begun = time.perf_counter()
        y = self.linear(x)
        self.took = time.perf_counter() - begun
        self.calls += 1
        return y


def test_an_attribute_that_every_call_makes_is_there_after_the_first(device):
    f = wrap(Timed().to(device), LADDER)
    with torch.no_grad():
        for rows in (3, 4, 1):
            f(randn(rows, WIDTH, device=device))
            assert f.took > 0
    assert not f.report().failures


def test_a_time_that_replays_do_not_take_is_named_once_and_what_they_count_is_counted(device, caplog):
    f = wrap(Timed().to(device), LADDER)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "ostinato.graphs"):
        for rows in (3, 4, 1):
            f(randn(rows, WIDTH, device=device))
    assert sum("took" in message for message in caplog.messages) == 1
    assert f.calls == 3
