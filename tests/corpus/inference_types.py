"""Precision, complex numbers, strides, batches of unusual sizes, forms of arguments and results."""

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from corpus.registry import World, program


def network(world, dtype=torch.float32):
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).to(world.device, dtype).eval()


@program("half-precision weights", tags=["precision"])
def half(world: World):
    f = world.graphed(network(world, torch.float16), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4, 1):
            yield f(world.randn(n, 6, dtype=torch.float16)).float()
    world.diagnose(f, world.randn(3, 6, dtype=torch.float16))


@program("bfloat16 with normalisation in float32", tags=["precision"])
def bfloat16(world: World):
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x):
            y = x.float()
            return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight

    model = nn.Sequential(Norm(), nn.Linear(6, 3)).to(world.device).bfloat16()
    f = world.graphed(model, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randn(n, 6, dtype=torch.bfloat16))
    world.diagnose(f, world.randn(3, 6, dtype=torch.bfloat16))


@program("autocast around every call", tags=["precision", "autocast"])
def autocast_outside(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    with torch.no_grad(), torch.autocast(world.device.type, torch.bfloat16):
        for n in (3, 4):
            y = f(world.randn(n, 6))
            yield y, str(y.dtype)
    with torch.no_grad():
        yield f(world.randn(3, 6))
    with torch.no_grad(), torch.autocast(world.device.type, torch.bfloat16):
        yield f(world.randn(3, 6))
        world.diagnose(f, world.randn(3, 6))


@program("autocast inside forward", tags=["precision", "autocast"])
def autocast_inside(world: World):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.head = network(world), nn.Linear(3, 2)

        def forward(self, x):
            with torch.autocast(x.device.type, torch.bfloat16):
                h = self.net(x)
            return self.head(h.float())

    f = world.graphed(Model().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randn(n, 6)).round(decimals=1)
    world.diagnose(f, world.randn(3, 6))


@program("double precision", tags=["precision", "double"])
def double(world: World):
    f = world.graphed(network(world, torch.float64), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randn(n, 6, dtype=torch.float64))
        world.attempt(lambda: f(world.randn(3, 6)))
    world.diagnose(f, world.randn(3, 6, dtype=torch.float64))


@program("inputs of several types to one function", tags=["precision", "signatures"])
def several_types(world: World):
    f = world.graphed(lambda x: (x * 2 + 1).sum(-1), ladder=[1, 2, 4])
    for dtype in (torch.float32, torch.int64, torch.float16, torch.float32, torch.float64):
        yield f(world.randint(9, 3, 4).to(dtype))
    world.diagnose(f, world.randn(3, 4))


@program("complex inputs and results", tags=["complex"])
def complex_numbers(world: World):
    w = torch.randn(4, 3, dtype=torch.complex64).to(world.device)

    def mix(z):
        y = z @ w
        return y, y.abs(), y.conj() * y, torch.view_as_real(y)

    f = world.graphed(mix, ladder=[1, 2, 4])
    for n in (3, 4, 1):
        yield f(torch.complex(world.randn(n, 4), world.randn(n, 4)))
    world.diagnose(f, torch.complex(world.randn(3, 4), world.randn(3, 4)))


@program("to(dtype) on the wrapper after the capture", tags=["precision", "changes"])
def to_dtype(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    with torch.no_grad():
        yield f(world.randn(3, 6))
        f = f.double()
        yield f(world.randn(3, 6, dtype=torch.float64))
    world.diagnose(f, world.randn(3, 6, dtype=torch.float64))


@program("default dtype switched to double", tags=["precision"])
def default_dtype(world: World):
    def grid(x):
        return x + torch.linspace(0, 1, 4, device=x.device)

    f = world.graphed(grid, ladder=[1, 2, 4])
    yield f(world.randn(3, 4))
    torch.set_default_dtype(torch.float64)
    try:
        yield f(world.randn(3, 4))
    finally:
        torch.set_default_dtype(torch.float32)
    yield f(world.randn(3, 4))
    world.diagnose(f, world.randn(3, 4))


@program("empty batch", tags=["batches"])
def empty_batch(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    with torch.no_grad():
        yield f(world.randn(3, 6))
        yield f(world.randn(0, 6))
        yield f(world.randn(2, 6))
    world.diagnose(f, world.randn(3, 6))


@program("empty batch comes first", tags=["batches"])
def empty_first(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    with torch.no_grad():
        yield f(world.randn(0, 6))
        yield f(world.randn(3, 6))
    world.diagnose(f, world.randn(3, 6))


@program("batches from one to far beyond the largest size", tags=["batches"])
def any_size(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4, 8])
    with torch.no_grad():
        yield [f(world.randn(n, 6)).clone() for n in (1, 100, 2, 3, 9, 8, 1000, 5)]
    world.diagnose(f, world.randn(3, 6))


@program("first call is larger than the largest size", tags=["batches"])
def too_large_first(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (20, 3, 1, 20):
            yield f(world.randn(n, 6)).clone()
    world.diagnose(f, world.randn(3, 6))


@program("sizes that are not powers of two, given unsorted", tags=["batches"])
def odd_sizes(world: World):
    f = world.graphed(network(world), ladder=[7, 3, 5])
    with torch.no_grad():
        yield [f(world.randn(n, 6)).clone() for n in (1, 3, 4, 7, 6)]
    world.diagnose(f, world.randn(3, 6))


@program("transposed, sliced and expanded inputs", tags=["strides"])
def strided(world: World):
    f = world.graphed(lambda x: x.softmax(-1) * 2, ladder=[1, 2, 4, 8])
    base = world.randn(6, 8)
    yield f(base.T).clone()
    yield f(base[::2]).clone()
    yield f(base[:, 1:7]).clone()
    yield f(world.randn(1, 8).expand(5, 8)).clone()
    yield f(base[1]).clone()
    yield f(base.flip(0)).clone()
    world.diagnose(f, base[:3])


@program("output with the strides of a transposed result", tags=["strides"])
def transposed_output(world: World):
    f = world.graphed(lambda x: x.transpose(1, 2) * 2, ladder=[1, 2, 4])
    for n in (3, 4):
        y = f(world.randn(n, 2, 5))
        yield y.is_contiguous(), y.stride()[1:], y.reshape(n, -1)
    world.attempt(lambda: f(world.randn(3, 2, 5)).view(3, 10))
    world.diagnose(f, world.randn(3, 2, 5))


@program("result viewed flat, as one does with contiguous results", tags=["strides"])
def viewed_flat(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4, 1):
            yield f(world.randn(n, 6)).view(-1) * 1.0
    world.diagnose(f, world.randn(3, 6))


@program("batch in dimension 1, sequence first", tags=["batches"])
def sequence_first(world: World):
    lstm = nn.LSTM(4, 5).to(world.device)
    f = world.graphed(lambda x: lstm(x)[0], ladder=[1, 2, 4], batch_dim=1)
    with torch.no_grad():
        for n in (3, 4):
            yield f(world.randn(6, n, 4)).clone()
    world.diagnose(f, world.randn(6, 3, 4))


@program("views of the input returned", tags=["aliasing"])
def views(world: World):
    def split(x):
        return x[:, :2], x[:, 2:].view(-1, 2, 2), x

    f = world.graphed(split, ladder=[1, 2, 4])
    for n in (3, 4):
        yield f(world.randn(n, 6))
    world.diagnose(f, world.randn(3, 6))


@program("result that is the input, edited afterwards", tags=["aliasing", "results-edited"])
def identity(world: World):
    f = world.graphed(nn.Dropout(0.5).to(world.device).eval(), ladder=[1, 2, 4])
    for n in (3, 4):
        x = world.randn(n, 3)
        y = f(x)
        y.mul_(2)
        yield y, x
    world.diagnose(f, world.randn(3, 3))


@program("two results that share memory, one edited", tags=["aliasing", "results-edited"])
def shared_results(world: World):
    def halves(x):
        y = x * 2
        return y, y[:, :2]

    f = world.graphed(halves, ladder=[1, 2, 4])
    for n in (4, 3):
        whole, left = f(world.randn(n, 4))
        left.zero_()
        yield whole
    world.diagnose(f, world.randn(3, 4))


@program("the same tensor as both arguments", tags=["aliasing"])
def same_twice(world: World):
    def covariance(a, b):
        return (a - a.mean(1, keepdim=True)) * (b - b.mean(1, keepdim=True))

    f = world.graphed(covariance, ladder=[1, 2, 4])
    for n in (3, 4):
        x = world.randn(n, 5)
        yield f(x, x)
        yield f(x, x[:, :1].expand(n, 5))
    world.diagnose(f, world.randn(3, 5), world.randn(3, 5))


@program("one result returned twice", tags=["aliasing", "structures"])
def returned_twice(world: World):
    def run(x):
        y = x.tanh()
        return y, {"same": y, "list": [y, None, 3, "text"]}

    f = world.graphed(run, ladder=[1, 2, 4])
    for n in (3, 4):
        first, second = f(world.randn(n, 2))
        yield first is second["same"], first, second
    world.diagnose(f, world.randn(3, 2))


@program("a parameter returned beside the result", tags=["aliasing", "structures"])
def parameter_returned(world: World):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return x @ self.weight.T, self.weight

    f = world.graphed(Model().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (2, 4):
            y, w = f(world.randn(n, 4))
            yield y, w, w is f.weight
    world.diagnose(f, world.randn(3, 4))


@program("nested dictionaries, lists, None and numbers in and out", tags=["structures"])
def nested(world: World):
    def run(batch, scale=2.0):
        x, (a, b) = batch["x"], batch["pair"]
        return {"sum": [x + a, x - b], "meta": {"scale": scale, "none": None, "name": batch["name"]}}

    f = world.graphed(run, ladder=[1, 2, 4])
    for n in (3, 4):
        yield f({"x": world.randn(n, 2), "pair": (world.randn(n, 2), world.randn(n, 2)), "name": "a"})
    world.diagnose(f, {"x": world.randn(3, 2), "pair": (world.randn(3, 2), world.randn(3, 2)), "name": "a"})


@program("dataclass in, dataclass out, with a default factory", tags=["structures"])
def dataclasses(world: World):
    @dataclass
    class Batch:
        x: torch.Tensor
        mask: torch.Tensor | None = None
        info: dict[str, Any] = field(default_factory=dict)

        def masked(self):
            return self.x if self.mask is None else self.x * self.mask[:, None]

    def run(batch):
        return Batch(batch.masked() * 2, batch.mask, {"rows": None})

    f = world.graphed(run, ladder=[1, 2, 4])
    for n in (3, 4):
        out = f(Batch(world.randn(n, 2), world.randint(2, n).bool()))
        yield type(out).__name__, out.masked(), out.info
    yield f(Batch(world.randn(2, 2))).x
    world.diagnose(f, Batch(world.randn(3, 2), world.randint(2, 3).bool()))


@program("an object of one's own as the argument", tags=["structures"])
def own_object(world: World):
    class Batch:
        def __init__(self, x, y):
            self.x, self.y = x, y

        def to(self, device):
            return Batch(self.x.to(device), self.y.to(device))

    f = world.graphed(lambda b: b.x * b.y, ladder=[1, 2, 4])
    for n in (3, 2):
        yield f(Batch(world.randn(n, 2), world.randn(n, 2)).to(world.device))
    world.diagnose(f, Batch(world.randn(3, 2), world.randn(3, 2)))


@program("simple namespace in and out", tags=["structures"])
def namespace(world: World):
    net = network(world)

    def run(batch):
        return SimpleNamespace(logits=net(batch.x), best=net(batch.x).argmax(-1))

    f = world.graphed(run, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 2):
            out = f(SimpleNamespace(x=world.randn(n, 6)))
            yield out.logits, out.best
    world.diagnose(f, SimpleNamespace(x=world.randn(3, 6)))


@program("enum and string arguments choose the branch", tags=["structures", "python"])
def enum_argument(world: World):
    class Pool(Enum):
        MEAN = "mean"
        MAX = "max"

    def pool(x, how=Pool.MEAN, activation="relu"):
        y = x.mean(1) if how is Pool.MEAN else x.amax(1)
        return getattr(torch, activation)(y)

    f = world.graphed(pool, ladder=[1, 2, 4])
    for how in (Pool.MEAN, Pool.MAX, Pool.MEAN):
        for activation in ("relu", "tanh"):
            yield f(world.randn(3, 4, 2), how, activation=activation)
    world.diagnose(f, world.randn(3, 4, 2))


@program("numpy results and numpy round trips", tags=["numpy"])
def numpy_results(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    rows = []
    with torch.no_grad():
        for n in (3, 4, 2):
            x = torch.from_numpy(np.asarray(world.randn(n, 6).cpu())).to(world.device)
            rows.append(f(x).cpu().numpy())
    yield np.concatenate(rows), np.concatenate(rows).argmax(1)
    world.diagnose(f, world.randn(3, 6))


@program("numpy arrays as arguments", tags=["numpy"])
def numpy_arguments(world: World):
    def run(x, weights):
        return x * torch.as_tensor(weights, device=x.device, dtype=x.dtype)

    f = world.graphed(run, ladder=[1, 2, 4])
    weights = np.array([1.0, 2.0])
    yield f(world.randn(3, 2), weights)
    weights[0] = 5
    yield f(world.randn(3, 2), weights)
    yield f(world.randn(3, 2), np.array([0.5, 0.5]))
    world.diagnose(f, world.randn(3, 2), weights)


@program("scalars out: item, float, tolist", tags=["numpy", "results-kept"])
def scalars(world: World):
    f = world.graphed(nn.Linear(3, 1).to(world.device), ladder=[1, 2, 4])
    history = []
    with torch.no_grad():
        for _ in range(4):
            history.append(f(world.randn(1, 3)).item())
            history.extend(f(world.randn(3, 3)).squeeze(-1).tolist())
    yield history
    world.diagnose(f, world.randn(3, 3))


@program("results edited in place, then the next call", tags=["results-edited"])
def edited(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4, 3):
            y = f(world.randn(n, 6))
            y -= y.max(-1, keepdim=True).values
            y.exp_()
            y /= y.sum(-1, keepdim=True)
            yield y
    world.diagnose(f, world.randn(3, 6))


@program("result fed back as the input, many times", tags=["feedback"])
def fed_back(world: World):
    lin = nn.Linear(4, 4).to(world.device)
    f = world.graphed(lambda x: lin(x).tanh(), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            x = world.randn(n, 4)
            for _ in range(20):
                x = f(x)
            yield x.clone()
            half = x[: n // 2]
            yield f(half).clone()
    world.diagnose(f, world.randn(3, 4))


@program("difference of two calls", tags=["results-kept"])
def difference_of_calls(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            x, y = world.randn(n, 6), world.randn(n, 6)
            yield f(x) - f(y), torch.stack([f(x), f(y)]).mean(0)
            yield nn.functional.cosine_similarity(f(x), f(y))
    world.diagnose(f, world.randn(3, 6))


@program("best result so far kept", tags=["results-kept", "feedback"])
def best_so_far(world: World):
    net = nn.Linear(4, 1).to(world.device)
    f = world.graphed(lambda x: (net(x.tanh()).squeeze(-1), x), ladder=[1, 2, 4])
    best_score, best_x = None, None
    with torch.no_grad():
        for _ in range(6):
            score, x = f(world.randn(4, 4))
            if best_score is None or score.max() > best_score.max():
                best_score, best_x = score, x
    yield best_score, best_x
    world.diagnose(f, world.randn(4, 4))


@program("results cached by key in a dictionary", tags=["results-kept"])
def cached_results(world: World):
    f, cache = world.graphed(network(world), ladder=[1, 2, 4]), {}

    def features(name, x):
        if name not in cache:
            cache[name] = f(x)
        return cache[name]

    with torch.no_grad():
        a, b = world.randn(2, 6), world.randn(3, 6)
        yield features("a", a) + 0, features("b", b) + 0
        yield features("a", a), sorted(cache)
    world.diagnose(f, a)


@program("results put into a preallocated tensor", tags=["results-kept"])
def preallocated(world: World):
    f = world.graphed(network(world), ladder=[4])
    data, out = world.randn(10, 6), torch.empty(10, 3, device=world.device)
    with torch.no_grad():
        for i in range(0, 10, 4):
            out[i : i + 4] = f(data[i : i + 4])
    yield out
    world.diagnose(f, data[:3])


@program("generator of predictions consumed lazily", tags=["results-kept", "python"])
def lazy(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])

    def predict(batches):
        with torch.no_grad():
            for batch in batches:
                yield f(batch)

    yield torch.cat(list(predict([world.randn(n, 6) for n in (3, 4, 2)])))
    first, *rest = predict([world.randn(2, 6) for _ in range(3)])
    yield first, rest
    world.diagnose(f, world.randn(3, 6))


@program("shape errors are raised as without graphs", tags=["exceptions"])
def shape_errors(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    with torch.no_grad():
        world.attempt(lambda: f(world.randn(3, 5)))
        yield f(world.randn(3, 6)).clone()
        world.attempt(lambda: f(world.randn(3, 5)))
        world.attempt(lambda: f())
        world.attempt(lambda: f(world.randn(3, 6), 1))
        world.attempt(lambda: f(x=world.randn(3, 6)))
        yield f(world.randn(2, 6)).clone()
    world.diagnose(f, world.randn(3, 6))


@program("exceptions of one's own in forward", tags=["exceptions", "python"])
def own_exceptions(world: World):
    def check(x, limit=4):
        if x.shape[-1] > limit:
            raise ValueError(f"{x.shape[-1]} features, at most {limit}")
        return x.sum(-1)

    f = world.graphed(check, ladder=[1, 2, 4])
    world.attempt(lambda: f(world.randn(3, 5)))
    yield f(world.randn(3, 4))
    world.attempt(lambda: f(world.randn(3, 5)))
    world.attempt(lambda: f(world.randn(3, 4), limit=2))
    yield f(world.randn(2, 4))
    world.diagnose(f, world.randn(3, 4))


@program("wrong type of input: a list, a number", tags=["exceptions"])
def wrong_types(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    with torch.no_grad():
        yield f(world.randn(3, 6))
        world.attempt(lambda: f([1.0, 2.0]))
        world.attempt(lambda: f(3))
        world.attempt(lambda: f(None))
        world.attempt(lambda: f(world.randint(4, 3, 6)))
    world.diagnose(f, world.randn(3, 6))


@program("unbatched input of one dimension", tags=["batches", "signatures"])
def unbatched(world: World):
    f = world.graphed(network(world), ladder=[1, 2, 4])
    with torch.no_grad():
        yield f(world.randn(3, 6)).clone()
        yield f(world.randn(6)).clone()
        yield f(world.randn(2, 5, 6)).clone()
    world.diagnose(f, world.randn(3, 6))


@program("arguments of different batch sizes broadcast", tags=["batches"])
def broadcast(world: World):
    f = world.graphed(lambda x, bias: x + bias, ladder=[1, 2, 4])
    for n in (3, 4, 1):
        yield f(world.randn(n, 2), world.randn(1, 2)).clone()
    world.diagnose(f, world.randn(3, 2), world.randn(3, 2))


@program("a Python float argument that changes every call", tags=["python", "signatures"])
def float_argument(world: World):
    net = network(world)
    f = world.graphed(lambda x, temperature: (net(x) / temperature).softmax(-1), ladder=[1, 2, 4])
    with torch.no_grad():
        for i in range(5):
            yield f(world.randn(3, 6), 1.0 + 0.1 * i).clone()
    world.diagnose(f, world.randn(3, 6), 1.0)


@program("split results unpacked by unbind over features", tags=["structures"])
def unbind(world: World):
    net = network(world)

    @torch.no_grad()
    def run(x):
        mean, log_std, value = net(x).unbind(-1)
        return mean, log_std.clamp(-2, 2).exp(), value

    f = world.graphed(run, ladder=[1, 2, 4])
    for n in (3, 4):
        mean, std, value = f(world.randn(n, 6))
        yield mean + std * value
    world.diagnose(f, world.randn(3, 6))


@program("squeeze without a dimension", tags=["batch-dependent", "batches"])
def squeeze(world: World):
    net = nn.Linear(6, 1).to(world.device)
    f = world.graphed(lambda x: net(x).squeeze(), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4, 1):
            yield f(world.randn(n, 6))
    world.diagnose(f, world.randn(3, 6))


@program("chunks of rows: the batch split inside", tags=["batch-dependent", "batches"])
def chunked(world: World):
    net = network(world)

    @torch.no_grad()
    def run(x):
        return torch.cat([net(part) for part in x.split(2)])

    f = world.graphed(run, ladder=[1, 2, 4])
    for n in (3, 4, 1):
        yield f(world.randn(n, 6))
    world.diagnose(f, world.randn(3, 6))


@program("pairs of rows folded together", tags=["batch-dependent", "batches"])
def folded(world: World):
    f = world.graphed(lambda x: x.view(-1, 2, x.shape[-1]).mean(1), ladder=[2, 4, 8])
    for n in (4, 6, 2):
        yield f(world.randn(n, 3))
    world.diagnose(f, world.randn(4, 3))


@program("length returned as a Python number", tags=["batch-dependent", "structures"])
def length_returned(world: World):
    f = world.graphed(lambda x: (x * 2, x.shape[0]), ladder=[2, 4])
    for n in (3, 4, 2):
        y, count = f(world.randn(n, 3))
        yield y, count
    world.diagnose(f, world.randn(3, 3))


@program("branch on the number of rows", tags=["batch-dependent", "python"])
def branch_on_rows(world: World):
    net = network(world)

    @torch.no_grad()
    def run(x):
        if x.shape[0] == 1:
            return net(x) * 2
        return net(x)

    f = world.graphed(run, ladder=[1, 2, 4])
    for n in (3, 1, 4, 2):
        yield f(world.randn(n, 6))
    world.diagnose(f, world.randn(3, 6))


@program("branch on a single row, which is padded", tags=["batch-dependent", "python"])
def branch_on_one_row(world: World):
    net = network(world)

    @torch.no_grad()
    def run(x):
        if len(x) == 1:
            return net(x) * 2
        return net(x)

    f = world.graphed(run, ladder=[2, 4])
    for n in (3, 1, 4, 2):
        yield f(world.randn(n, 6))
    world.diagnose(f, world.randn(3, 6))
