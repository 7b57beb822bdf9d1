"""What Python brings: closures, settings, state, and what changes after the capture."""

import copy
import functools
import itertools
import logging
import os
import time
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from corpus.registry import World, program

SCALE = 2.0
FEATURES = {"bias": True, "scale": 3.0}
counter = itertools.count()
calls = 0


def network(world, inside=4, outside=3):
    return nn.Sequential(nn.Linear(inside, 8), nn.ReLU(), nn.Linear(8, outside)).to(world.device).eval()


@program("closure over a number that is rebound", tags=["python", "changes"])
def closure(world: World):
    scale = 2.0

    def run(x):
        return x * scale

    f = world.graphed(run, ladder=[1, 2, 4])
    yield f(world.randn(3, 2)).clone()
    scale = 3.0
    yield f(world.randn(3, 2)).clone()
    scale = 2.0
    yield f(world.randn(3, 2)).clone()
    world.diagnose(f, world.randn(3, 2))


@program("global constant changed between calls", tags=["python", "changes"])
def global_constant(world: World):
    global SCALE
    SCALE = 2.0

    def run(x):
        return x * SCALE

    f = world.graphed(run, ladder=[1, 2, 4])
    yield f(world.randn(3, 2)).clone()
    SCALE = 5.0
    yield f(world.randn(3, 2)).clone()
    SCALE = 2.0
    world.diagnose(f, world.randn(3, 2))


@program("feature flags in a module-level dictionary", tags=["python", "changes"])
def feature_flags(world: World):
    FEATURES.update(bias=True, scale=3.0)
    FEATURES.pop("extra", None)

    def run(x):
        y = x * FEATURES["scale"]
        if FEATURES["bias"]:
            y = y + 1
        if "extra" in FEATURES:
            y = y * 100
        return y

    f = world.graphed(run, ladder=[1, 2, 4])
    x = world.randn(3, 2)
    yield f(x).clone()
    FEATURES["bias"] = False
    yield f(x).clone()
    FEATURES["extra"] = 1
    yield f(x).clone()
    del FEATURES["extra"]
    FEATURES["bias"] = True
    yield f(x).clone()
    world.diagnose(f, x)


@program("partial with bound tensors and options", tags=["python"])
def partial(world: World):
    def linear(weight, bias, x, *, activation):
        return activation(F.linear(x, weight, bias))

    w, b = torch.randn(3, 4, device=world.device), torch.randn(3, device=world.device)
    f = world.graphed(functools.partial(linear, w, b, activation=torch.tanh), ladder=[1, 2, 4])
    for n in (3, 1):
        yield f(world.randn(n, 4)).clone()
    w.mul_(2)
    yield f(world.randn(4, 4))
    world.diagnose(f, world.randn(3, 4))


@program("configuration object read in forward", tags=["python", "changes"])
def configuration(world: World):
    @dataclass
    class Config:
        scale: float = 1.0
        activation: str = "relu"
        clip: float | None = None

    class Model(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config, self.lin = config, nn.Linear(4, 3)

        def forward(self, x):
            y = getattr(F, self.config.activation)(self.lin(x)) * self.config.scale
            return y if self.config.clip is None else y.clamp(max=self.config.clip)

    config = Config()
    f = world.graphed(Model(config).to(world.device), ladder=[1, 2, 4])
    x = world.randn(3, 4)
    with torch.no_grad():
        for change in (
            {},
            {"scale": 2.0},
            {"activation": "silu"},
            {"clip": 0.1},
            {"scale": 1.0, "activation": "relu", "clip": None},
        ):
            for name, value in change.items():
                setattr(config, name, value)
            yield f(x).clone()
    world.diagnose(f, x)


@program("counter of calls in forward", tags=["python-state"])
def call_counter(world: World):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.calls = nn.Linear(4, 3), 0

        def forward(self, x):
            self.calls += 1
            return self.lin(x)

    f = world.graphed(Model().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4, 3):
            yield f(world.randn(n, 4)).clone()
    yield f.calls
    world.diagnose(f, world.randn(3, 4))


@program("global counter of calls", tags=["python-state"])
def global_counter(world: World):
    global calls
    calls = 0

    def run(x):
        global calls
        calls += 1
        return x * 2

    f = world.graphed(run, ladder=[1, 2, 4])
    for n in (3, 4):
        yield f(world.randn(n, 4)).clone()
    yield calls
    world.diagnose(f, world.randn(3, 4))


@program("itertools.count and next in forward", tags=["python-state"])
def iterator_state(world: World):
    ids = itertools.count()
    f = world.graphed(lambda x: x + next(ids), ladder=[2, 4])
    for n in (3, 4, 2):
        yield f(world.randn(n, 2)).clone()
    world.diagnose(f, world.randn(3, 2))


@program("statistics logged to a list as numbers", tags=["python-state", "host-values"])
def logged_numbers(world: World):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.history = nn.Linear(4, 3), []

        def forward(self, x):
            y = self.lin(x)
            self.history.append(y.norm().item())
            return y

    f = world.graphed(Model().to(world.device), ladder=[2, 4])
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randn(n, 4)).clone()
    yield len(f.history), f.history
    world.diagnose(f, world.randn(3, 4))


@program("features kept in a list by forward", tags=["python-state"])
def features_list(world: World):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            self.features = []
            for layer in self.layers:
                x = layer(x).relu()
                self.features.append(x)
            return x

    f = world.graphed(Model().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randn(n, 4)).clone()
            yield [x.clone() for x in f.features]
    world.diagnose(f, world.randn(3, 4))


@program("logger and print with shapes only", tags=["python"])
def logging_shapes(world: World):
    logger = logging.getLogger("corpus.model")

    def run(x):
        logger.debug("running %s", tuple(x.shape))
        return x.relu()

    f = world.graphed(run, ladder=[1, 2, 4])
    for n in (3, 4):
        yield f(world.randn(n, 2)).clone()
    world.diagnose(f, world.randn(3, 2))


@program("timings measured in forward", tags=["python-state"])
def timings(world: World):
    class Timed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.count = inner, 0

        def forward(self, x):
            begun = time.perf_counter()
            y = self.inner(x)
            self.took = time.perf_counter() - begun
            return y

    f = world.graphed(Timed(network(world)), watch=False, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randn(n, 4)).clone(), f.took > 0
    world.diagnose(f, world.randn(3, 4))


@program("assertions on shapes and types", tags=["python", "exceptions"])
def assertions(world: World):
    def run(x):
        assert x.dim() == 2, f"expected 2 dimensions, got {x.dim()}"
        assert x.is_floating_point()
        return x.sum(1)

    f = world.graphed(run, ladder=[1, 2, 4])
    yield f(world.randn(3, 2)).clone()
    world.attempt(lambda: f(world.randn(3, 2, 2)))
    world.attempt(lambda: f(world.randint(3, 3, 2)))
    yield f(world.randn(4, 2)).clone()
    world.diagnose(f, world.randn(3, 2))


@program("assertion on values (no NaN)", tags=["python", "host-values"])
def assert_values(world: World):
    def run(x):
        y = x.log1p()
        assert not torch.isnan(y).any(), "NaN in y"
        return y

    f = world.graphed(run, ladder=[1, 2, 4])
    yield f(world.rand(3, 2)).clone()
    world.attempt(lambda: f(world.rand(3, 2) - 5))
    yield f(world.rand(4, 2))
    world.diagnose(f, world.rand(3, 2))


@program("memo by lru_cache of a function of the shape", tags=["python-state"])
def memo(world: World):
    @functools.lru_cache
    def mask(length):
        return torch.ones(length, length, device=world.device).tril()

    f = world.graphed(lambda x: mask(x.shape[1]) @ x, ladder=[1, 2, 4])
    for n, length in ((3, 4), (2, 4), (3, 5), (3, 4)):
        yield f(world.randn(n, length, 2)).clone()
    world.diagnose(f, world.randn(3, 4, 2))


@program("attribute made at the first call", tags=["python-state"])
def lazy_attribute(world: World):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = None

        def forward(self, x):
            if self.mask is None:
                self.mask = torch.ones(x.shape[1], device=x.device).cumsum(0)
            return x * self.mask

    f = world.graphed(Model().to(world.device), ladder=[1, 2, 4])
    for n in (3, 4, 1):
        yield f(world.randn(n, 4)).clone()
    world.diagnose(f, world.randn(3, 4))


@program("lazy layers that take their width from the first batch", tags=["python-state"])
def lazy_layers(world: World):
    f = world.graphed(
        nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2)).to(world.device), ladder=[1, 2, 4]
    )
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randn(n, 5)).clone()
    world.diagnose(f, world.randn(3, 5))


@program("cached property of a module", tags=["python"])
def cached_property(world: World):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.raw = nn.Parameter(torch.randn(4))

        @functools.cached_property
        def table(self):
            return torch.linspace(0, 1, 4, device=self.raw.device)

        @property
        def scale(self):
            return F.softplus(self.raw)

        def forward(self, x):
            return x * self.scale + self.table

    f = world.graphed(Model().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        yield f(world.randn(3, 4)).clone()
        f.raw.add_(1)
        yield f(world.randn(3, 4)).clone(), f.scale
    world.diagnose(f, world.randn(3, 4))


@program("class attribute changed on the class", tags=["python", "changes"])
def class_attribute(world: World):
    class Model(nn.Module):
        temperature = 1.0

        def forward(self, x):
            return x / self.temperature

    f = world.graphed(Model().to(world.device), ladder=[1, 2, 4])
    yield f(world.randn(3, 2)).clone()
    Model.temperature = 4.0
    yield f(world.randn(3, 2)).clone()
    f.temperature = 8.0
    yield f(world.randn(3, 2)).clone()
    world.diagnose(f, world.randn(3, 2))


@program("environment variable read in forward", tags=["python"])
def environment(world: World):
    os.environ.pop("CORPUS_SCALE", None)

    def run(x):
        return x * float(os.environ.get("CORPUS_SCALE", "2"))

    f = world.graphed(run, ladder=[1, 2, 4])
    for n in (3, 4):
        yield f(world.randn(n, 2)).clone()
    world.diagnose(f, world.randn(3, 2))


@program("default dictionary of experts by task name", tags=["python"])
def tasks(world: World):
    class MultiTask(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Linear(4, 6)
            self.heads = nn.ModuleDict({"a": nn.Linear(6, 2), "b": nn.Linear(6, 3)})

        def forward(self, x, task="a"):
            return self.heads[task](self.trunk(x).relu())

    f = world.graphed(MultiTask().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for task in "abab":
            yield f(world.randn(3, 4), task).clone()
        yield {k: f(world.randn(2, 4), task=k).clone() for k in "ab"}
        world.attempt(lambda: f(world.randn(2, 4), task="c"))
    world.diagnose(f, world.randn(3, 4))


@program("context manager of one's own around the computation", tags=["python"])
def own_context(world: World):
    import contextlib

    active = []

    @contextlib.contextmanager
    def scope(name):
        active.append(name)
        try:
            yield
        finally:
            active.pop()

    def run(x):
        with scope("outer"):
            return x * len(active)

    f = world.graphed(run, ladder=[1, 2, 4])
    for n in (3, 4):
        yield f(world.randn(n, 2)).clone()
    with scope("more"):
        yield f(world.randn(3, 2)).clone()
    yield active
    world.diagnose(f, world.randn(3, 2))


@program("layers dropped by a list of indices", tags=["python", "changes"])
def layer_list(world: World):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
            self.use = [0, 1, 2, 3]

        def forward(self, x):
            for i in self.use:
                x = self.layers[i](x).tanh()
            return x

    f = world.graphed(Model().to(world.device), ladder=[1, 2, 4])
    x = world.randn(3, 4)
    with torch.no_grad():
        yield f(x).clone()
        f.use.remove(2)
        yield f(x).clone()
        f.use = [0]
        yield f(x).clone()
    world.diagnose(f, x)


@program("dispatch table of functions, an entry replaced", tags=["python", "changes"])
def dispatch_table(world: World):
    table = {"act": torch.relu, "post": lambda y: y * 2}

    def run(x):
        return table["post"](table["act"](x))

    f = world.graphed(run, ladder=[1, 2, 4])
    x = world.randn(3, 2)
    yield f(x).clone()
    table["act"] = torch.sigmoid
    yield f(x).clone()
    table["post"] = lambda y: y - 1
    yield f(x).clone()
    world.diagnose(f, x)


@program("recursion over a tree of modules", tags=["python"])
def tree(world: World):
    class Node(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.gate = nn.Linear(4, 1)
            self.left = Node(depth - 1) if depth else None
            self.right = Node(depth - 1) if depth else None
            self.leaf = nn.Parameter(torch.randn(2))

        def forward(self, x):
            if self.left is None:
                return self.leaf.expand(x.shape[0], 2)
            p = self.gate(x).sigmoid()
            return p * self.left(x) + (1 - p) * self.right(x)

    f = world.graphed(Node(2).to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randn(n, 4)).clone()
    world.diagnose(f, world.randn(3, 4))


@program("training and evaluation switched back and forth", tags=["training-mode", "changes"])
def train_eval(world: World):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0)).to(world.device)
    f = world.graphed(model.eval(), ladder=[2, 4])
    x = world.randn(4, 4)
    with torch.no_grad():
        yield f(x).clone()
        f.train()
        yield f(x).clone()
        f.eval()
        yield f(x).clone()
        model.train()
        yield f(x).clone()
        model.eval()
    world.diagnose(f, x)


@program("dropout left on for monte carlo dropout", tags=["training-mode", "random"])
def mc_dropout(world: World):
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1)).to(world.device).train()
    f = world.graphed(model, ladder=[2, 4])
    with torch.no_grad():
        x = world.randn(4, 4)
        draws = torch.stack([f(x).clone() for _ in range(30)])
        yield draws.shape, bool((draws.std(0) > 0).all())
        world.diagnose(f, x)


@program("a layer added after the capture", tags=["changes"])
def layer_added(world: World):
    model = network(world)
    f = world.graphed(model, ladder=[1, 2, 4])
    x = world.randn(3, 4)
    with torch.no_grad():
        yield f(x).clone()
        model.append(nn.Tanh())
        yield f(x).clone()
    world.diagnose(f, x)


@program("an activation replaced after the capture", tags=["changes"])
def activation_replaced(world: World):
    model = network(world)
    f = world.graphed(model, ladder=[1, 2, 4])
    x = world.randn(3, 4)
    with torch.no_grad():
        yield f(x).clone()
        model[1] = nn.GELU()
        yield f(x).clone()
        model[1].approximate = "tanh"
        yield f(x).clone()
    world.diagnose(f, x)


@program("weights loaded, pruned and frozen after the capture", tags=["changes"])
def weights_changed(world: World):
    model = network(world)
    f = world.graphed(model, ladder=[1, 2, 4])
    x = world.randn(3, 4)
    saved = {k: v.clone() + 0.5 for k, v in model.state_dict().items()}
    with torch.no_grad():
        yield f(x).clone()
        model.load_state_dict(saved)
        yield f(x).clone()
        model[0].weight[model[0].weight.abs() < 0.5] = 0
        yield f(x).clone()
        model.requires_grad_(False)
        yield f(x).clone()
        nn.init.zeros_(model[2].bias)
        yield f(x).clone()
    world.diagnose(f, x)


@program("weights loaded with assign=True", tags=["changes"])
def weights_assigned(world: World):
    model = network(world)
    f = world.graphed(model, ladder=[1, 2, 4])
    x = world.randn(3, 4)
    with torch.no_grad():
        yield f(x).clone()
        model.load_state_dict({k: v.clone() + 0.5 for k, v in model.state_dict().items()}, assign=True)
        yield f(x).clone()
    world.diagnose(f, x)


@program("recapture after surgery, as the error says", tags=["changes"])
def recapture(world: World):
    model = network(world)
    f = world.graphed(model, ladder=[1, 2, 4])
    x = world.randn(3, 4)
    with torch.no_grad():
        yield f(x).clone()
        model[0] = nn.Linear(4, 8).to(world.device)
        if world.graphs:
            f.recapture()
        yield f(x).clone()
        model[0].bias.zero_()
        yield f(x).clone()
    world.diagnose(f, x)


@program("lora merged and unmerged", tags=["changes", "text"])
def lora(world: World):
    class LoRALinear(nn.Linear):
        def __init__(self, a, b):
            super().__init__(a, b)
            self.A, self.B = nn.Parameter(torch.randn(2, a)), nn.Parameter(torch.randn(b, 2))
            self.merged = False

        def merge(self):
            self.weight.data += self.B @ self.A
            self.merged = True

        def forward(self, x):
            y = super().forward(x)
            return y if self.merged else y + x @ self.A.T @ self.B.T

    model = LoRALinear(4, 3).to(world.device)
    f = world.graphed(model, ladder=[1, 2, 4])
    x = world.randn(3, 4)
    with torch.no_grad():
        yield f(x).clone()
        f.merge()
        yield f(x).clone()
        f.B.mul_(0)
        yield f(x).clone()
    world.diagnose(f, x)


@program("monkey-patched forward of one layer", tags=["changes"])
def patched(world: World):
    model = network(world)
    f = world.graphed(model, ladder=[1, 2, 4])
    x = world.randn(3, 4)
    with torch.no_grad():
        yield f(x).clone()
        original = model[0].forward
        model[0].forward = lambda y: original(y) * 2
        yield f(x).clone()
        del model[0].forward
        yield f(x).clone()
    world.diagnose(f, x)


@program("forward hook that collects activations", tags=["hooks", "python-state"])
def hook_collects(world: World):
    model, seen = network(world), {}
    model[0].register_forward_hook(lambda m, args, out: seen.__setitem__("hidden", out.detach()))
    f = world.graphed(model, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randn(n, 4)).clone()
            yield seen["hidden"].clone()
    world.diagnose(f, world.randn(3, 4))


@program("forward hook added after the capture, then removed", tags=["hooks", "changes"])
def hook_added(world: World):
    model = network(world)
    f = world.graphed(model, ladder=[1, 2, 4])
    x = world.randn(3, 4)
    with torch.no_grad():
        yield f(x).clone()
        handle = model[2].register_forward_hook(lambda m, args, out: out * 10)
        yield f(x).clone()
        handle.remove()
        yield f(x).clone()
    world.diagnose(f, x)


@program("hook on the wrapper itself", tags=["hooks", "changes"])
def hook_on_wrapper(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    shapes = []
    f.register_forward_hook(lambda m, args, out: shapes.append(tuple(out.shape)))
    f.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randn(n, 4)).clone()
    yield shapes
    world.diagnose(f, world.randn(3, 4))


@program("spectral norm and weight norm", tags=["hooks"])
def parametrised(world: World):
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
    )
    f = world.graphed(model.to(world.device).eval(), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randn(n, 4)).clone()
        model[0].parametrizations.weight.original0.mul_(2)
        yield f(world.randn(2, 4)).clone()
    world.diagnose(f, world.randn(3, 4))


@program("two wrapped modules that share weights", tags=["modules"])
def shared_weights(world: World):
    emb = nn.Embedding(9, 4).to(world.device)

    class Head(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, h):
            return h @ self.weight.T

    encode = world.graphed(emb, ladder=[1, 2, 4])
    decode = world.graphed(Head(emb.weight), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            yield decode(encode(world.randint(9, n))).clone()
        emb.weight.mul_(0.5)
        yield decode(encode(world.randint(9, 3))).clone()
    world.diagnose(decode, world.randn(3, 4))


@program("wrapped module inside another module", tags=["modules"])
def inside_another(world: World):
    class Outer(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body, self.head = body, nn.Linear(3, 2)

        def forward(self, x):
            return self.head(self.body(x).relu())

    model = Outer(world.graphed(network(world), ladder=[1, 2, 4])).to(world.device)
    with torch.no_grad():
        for n in (3, 4):
            yield model(world.randn(n, 4)).clone()
    yield list(model.state_dict()), sum(p.numel() for p in model.parameters())
    world.watch(model)
    world.diagnose(model.body, world.randn(3, 4))


@program("wrapped module inside a wrapped module", tags=["modules"])
def nested_wrappers(world: World):
    inner = world.graphed(network(world, 4, 4), ladder=[1, 2, 4])
    outer = world.graphed(nn.Sequential(inner, nn.Linear(4, 2).to(world.device)), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            yield outer(world.randn(n, 4)).clone()
            yield inner(world.randn(n, 4)).clone()
    world.diagnose(outer, world.randn(3, 4))


@program("encoder and decoder wrapped separately, as attributes", tags=["modules"])
def attributes_wrapped(world: World):
    class Auto(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(6, 2), nn.Linear(2, 6)

        def forward(self, x):
            return self.decoder(self.encoder(x).tanh())

    model = Auto().to(world.device)
    model.encoder = world.graphed(model.encoder, ladder=[1, 2, 4])
    model.decoder = world.graphed(model.decoder, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            x = world.randn(n, 6)
            yield (model(x) - x).pow(2).mean(1)
        torch.save(model.state_dict(), os.devnull)
        yield sorted(model.state_dict())
    world.diagnose(model.encoder, world.randn(3, 6))


@program("method wrapped in place of the attribute", tags=["modules", "python"])
def wrapped_method(world: World):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)

        def encode(self, x):
            return self.lin(x).relu()

        def forward(self, x):
            return self.encode(x).sum(-1)

    model = Model().to(world.device)
    model.encode = world.graphed(model.encode, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            yield model(world.randn(n, 4)).clone()
    world.diagnose(model.encode, world.randn(3, 4))


@program("deepcopy of a wrapper, the copy fine-tuned", tags=["copies"])
def deep_copy(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    x = world.randn(3, 4)
    with torch.no_grad():
        yield f(x).clone()
        other = copy.deepcopy(f)
        world.report_of(other)
        other[0].weight.mul_(2)
        yield other(x).clone(), f(x).clone()
        f[2].bias.add_(1)
        yield other(x).clone(), f(x).clone()
    world.diagnose(other, x)


class Saved(nn.Module):
    """At the top of the module, so that it can be pickled."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 3)

    def forward(self, x):
        return self.lin(x).tanh()


@program("torch.save and torch.load of a wrapper", tags=["copies"])
def saved(world: World):
    import io

    f = world.graphed(Saved().to(world.device), ladder=[1, 2, 4])
    x = world.randn(3, 4)
    with torch.no_grad():
        yield f(x).clone()
        file = io.BytesIO()
        torch.save(f, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        yield loaded(x).clone(), type(loaded).__mro__[-2].__name__, isinstance(loaded, Saved)
        file = io.BytesIO()
        torch.save(f.state_dict(), file)
        file.seek(0)
        fresh = Saved().to(world.device)
        yield fresh.load_state_dict(torch.load(file)), fresh(x)
    world.diagnose(f, x)


@program("ensemble: a list of wrapped members, mean of their results", tags=["modules", "results-kept"])
def ensemble(world: World):
    members = [world.graphed(network(world), ladder=[1, 2, 4]) for _ in range(3)]
    with torch.no_grad():
        for n in (3, 4):
            x = world.randn(n, 4)
            votes = torch.stack([m(x).softmax(-1) for m in members])
            yield votes.mean(0), votes.std(0)
            raw = [m(x) for m in members]
            yield sum(raw) / len(raw)
    world.diagnose(members[0], x)


@program("decorator syntax on a function", tags=["python"])
def decorated(world: World):
    lin = network(world)

    @functools.partial(world.graphed, ladder=[1, 2, 4])
    def predict(x):
        """Predicts."""
        return lin(x).softmax(-1)

    with torch.no_grad():
        for n in (3, 4):
            yield predict(world.randn(n, 4)).clone()
    yield predict.__name__, predict.__doc__
    world.diagnose(predict, world.randn(3, 4))


@program("decorator on a method of a class, two instances", tags=["python", "modules"])
def decorated_method(world: World):
    class Service:
        def __init__(self, scale):
            self.net, self.scale = network(world), scale

        @functools.partial(world.graphed, ladder=[1, 2, 4])
        def predict(self, x):
            return self.net(x) * self.scale

    a, b = Service(1.0), Service(2.0)
    x = world.randn(3, 4)
    with torch.no_grad():
        for service in (a, b, a):
            yield service.predict(x).clone()
        a.scale = 5.0
        yield a.predict(x).clone(), b.predict(x).clone()
    world.diagnose(b.predict, x)


@program("subclass overrides forward and calls super", tags=["modules"])
def hierarchy(world: World):
    class Base(nn.Module):
        bias = 1.0

        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)

        def activate(self, x):
            return x.relu()

        def forward(self, x):
            return self.activate(self.lin(x)) + self.bias

    class Derived(Base):
        bias = 2.0

        def activate(self, x):
            return super().activate(x).sqrt()

        def forward(self, x):
            return super().forward(x) * 3

    for kind in (Base, Derived):
        f = world.graphed(kind().to(world.device), ladder=[1, 2, 4])
        with torch.no_grad():
            for n in (3, 4):
                yield f(world.randn(n, 4)).clone(), isinstance(f, Base), f.bias
    world.diagnose(f, world.randn(3, 4))


@program("a callable object with state_dict of its own", tags=["python"])
def callable_object(world: World):
    class Predictor:
        def __init__(self, model):
            self.model, self.threshold = model, 0.5

        @torch.inference_mode()
        def __call__(self, x):
            return self.model(x).sigmoid() > self.threshold

    predictor = Predictor(network(world))
    f = world.graphed(predictor, ladder=[1, 2, 4])
    yield f(world.randn(3, 4)).clone()
    predictor.threshold = 0.9
    yield f(world.randn(3, 4)).clone()
    world.diagnose(f, world.randn(3, 4))


@program("inference mode, no_grad and plain calls mixed", tags=["grad-modes"])
def grad_modes(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    x = world.randn(3, 4)
    with torch.inference_mode():
        yield f(x).clone(), f(world.randn(2, 4)).sum().item()
    with torch.no_grad():
        yield f(x).clone()
    yield f(x).detach().clone()
    with torch.inference_mode():
        y = f(world.randn(4, 4))
    yield (y * 2).sum().item()
    world.diagnose(f, x)


@program("inputs made in inference mode", tags=["grad-modes"])
def inference_inputs(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    with torch.inference_mode():
        inputs = [world.randn(n, 4) * 1 for n in (3, 4, 2)]
    with torch.no_grad():
        for x in inputs:
            yield f(x).clone()
    with torch.inference_mode():
        for x in inputs:
            yield f(x).clone()
    world.diagnose(f, world.randn(3, 4))


@program("saliency: gradients with respect to the input, outside the wrapper", tags=["grad-modes"])
def saliency(world: World):
    model = network(world)
    f = world.graphed(model, ladder=[1, 2, 4])
    with torch.no_grad():
        x = world.randn(3, 4)
        best = f(x).argmax(-1)
    x = world.randn(3, 4).requires_grad_()
    model(x).gather(1, best[:, None]).sum().backward()
    yield best, x.grad
    model.zero_grad()
    with torch.no_grad():
        yield f(x.detach()).clone()
    world.diagnose(f, world.randn(3, 4))


@program("input that requires gradients, evaluated without grad", tags=["grad-modes"])
def requires_grad_input(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    x = world.randn(3, 4).requires_grad_()
    with torch.no_grad():
        yield f(x).clone()
        yield f(x * 2).clone()
    world.diagnose(f, world.randn(3, 4))


@program("enable_grad inside: energy and forces", tags=["grad-modes", "physics"])
def forces(world: World):
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(world.device)

    def energy_and_forces(positions):
        with torch.enable_grad():
            p = positions.detach().requires_grad_()
            energy = net(p).squeeze(-1)
            (grad,) = torch.autograd.grad(energy.sum(), p)
        return energy.detach(), -grad

    f = world.graphed(energy_and_forces, ladder=[1, 2, 4])
    for n in (3, 4):
        yield f(world.randn(n, 3))
    world.diagnose(f, world.randn(3, 3))


@program("vmap and jacobian inside the function", tags=["grad-modes", "transforms"])
def transforms(world: World):
    w = torch.randn(3, 3, device=world.device)

    def field(x):
        return (w @ x).sin()

    def divergence(x):
        jacobian = torch.func.vmap(torch.func.jacrev(field))(x)
        return jacobian.diagonal(dim1=-2, dim2=-1).sum(-1)

    f = world.graphed(divergence, ladder=[1, 2, 4])
    for n in (3, 4):
        yield f(world.randn(n, 3))
    world.diagnose(f, world.randn(3, 3))


@program("functional_call with parameters from a dictionary", tags=["transforms", "changes"])
def functional_call(world: World):
    model = network(world)
    params = {k: v.detach().clone() for k, v in model.named_parameters()}
    f = world.graphed(lambda x: torch.func.functional_call(model, params, (x,)), ladder=[1, 2, 4])
    with torch.no_grad():
        yield f(world.randn(3, 4)).clone()
        params["2.bias"] += 1
        yield f(world.randn(3, 4)).clone()
    world.diagnose(f, world.randn(3, 4))


@program("service object: preprocess, wrapped model, postprocess", tags=["python", "structures"])
def service(world: World):
    class Service:
        labels = ("cat", "dog", "bird")

        def __init__(self, model):
            self.model = world.graphed(model, ladder=[1, 2, 4])
            self.requests = 0

        @torch.inference_mode()
        def __call__(self, texts):
            self.requests += len(texts)
            x = torch.tensor([[len(t), t.count("a"), t.count("e"), 1] for t in texts], dtype=torch.float32)
            scores, best = self.model(x.to(world.device)).softmax(-1).max(-1)
            return [
                {"label": self.labels[i], "score": round(s, 3)}
                for i, s in zip(best.tolist(), scores.tolist(), strict=True)
            ]

    s = Service(network(world))
    yield s(["banana", "tree"]), s(["x"]), s(["apple", "pear", "fig", "egg"])
    yield s.requests
    world.diagnose(s.model, world.randn(3, 4))


@program("micro-batching: requests grouped, results handed back", tags=["python", "results-kept"])
def micro_batching(world: World):
    f, futures = world.graphed(network(world), ladder=[1, 2, 4]), defaultdict(list)
    requests = [(f"r{i}", world.randn(4)) for i in range(7)]
    with torch.inference_mode():
        while requests:
            batch, requests = requests[:3], requests[3:]
            out = f(torch.stack([x for _, x in batch]))
            for (name, _), row in zip(batch, out, strict=True):
                futures[name].append(row)
    yield {k: torch.stack(v) for k, v in futures.items()}
    world.diagnose(f, world.randn(3, 4))


@program("results per user in an ordered dictionary with eviction", tags=["python", "results-kept"])
def eviction(world: World):
    f, cache = world.graphed(network(world), ladder=[1, 2]), OrderedDict()
    with torch.no_grad():
        for user in (1, 2, 1, 3, 2, 4):
            if user not in cache:
                cache[user] = f(world.randn(1, 4))
                if len(cache) > 2:
                    cache.popitem(last=False)
            else:
                cache.move_to_end(user)
    yield list(cache), torch.cat(list(cache.values()))
    world.diagnose(f, world.randn(1, 4))


@program("argument object reused and refilled in place", tags=["python", "feedback"])
def refilled(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    buffer = torch.zeros(4, 4, device=world.device)
    with torch.no_grad():
        for n in (4, 3, 4, 1):
            buffer[:n].copy_(world.randn(n, 4))
            yield f(buffer[:n]).clone()
    world.diagnose(f, buffer[:3])


@program("options namespace that is replaced as a whole", tags=["python", "changes"])
def namespace_replaced(world: World):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.options = nn.Linear(4, 3), SimpleNamespace(scale=1.0, bias=True)

        def forward(self, x):
            y = self.lin(x) * self.options.scale
            return y + 1 if self.options.bias else y

    f = world.graphed(Model().to(world.device), ladder=[1, 2, 4])
    x = world.randn(3, 4)
    with torch.no_grad():
        yield f(x).clone()
        f.options = SimpleNamespace(scale=1.0, bias=True)
        yield f(x).clone()
        f.options = SimpleNamespace(scale=2.0, bias=False)
        yield f(x).clone()
    world.diagnose(f, x)


@program("attribute that no code reads changes every call", tags=["python"])
def unread_attribute(world: World):
    model = network(world)
    f = world.graphed(model, ladder=[1, 2, 4])
    model.losses = []
    with torch.no_grad():
        for epoch in range(4):
            model.epoch = epoch
            y = f(world.randn(3, 4))
            model.losses.append(y.mean().item())
            yield y.clone()
    world.diagnose(f, world.randn(3, 4))
