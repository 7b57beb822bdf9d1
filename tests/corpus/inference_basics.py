"""Small networks and functions, called with many batch sizes."""

import torch
from torch import nn
from torch.nn import functional as F

from corpus.registry import World, program


@program("mlp", tags=["basics"])
def mlp(world: World):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(world.device).eval()
    f = world.graphed(model, ladder=[1, 2, 4, 8])
    with torch.no_grad():
        for rows in (3, 1, 8, 5, 2):
            yield f(world.randn(rows, 8))
    world.diagnose(f, world.randn(3, 8))


@program("mlp, each result used at once", tags=["basics"])
def mlp_used_at_once(world: World):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(world.device).eval()
    f = world.graphed(model, ladder=[1, 4, 16])
    correct = 0
    with torch.inference_mode():
        for rows in (16, 16, 7):
            labels = world.randint(4, rows)
            correct += int((f(world.randn(rows, 8)).argmax(-1) == labels).sum())
    yield correct
    world.diagnose(f, world.randn(3, 8))


@program("predictions collected and concatenated", tags=["basics", "results-kept"])
def collected(world: World):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(world.device).eval()
    f = world.graphed(model, ladder=[2, 4, 8])
    data, predictions = world.randn(21, 8), []
    with torch.no_grad():
        for batch in data.split(8):
            predictions.append(F.softmax(f(batch), -1))
    yield torch.cat(predictions)
    logits = [f(batch) for batch in data.split(8)]
    yield torch.cat(logits).sum(0)
    world.diagnose(f, data[:5])


@program("function of two arguments", tags=["basics"])
def two_arguments(world: World):
    def distance(a, b):
        return (a - b).pow(2).sum(-1).sqrt()

    f = world.graphed(distance, ladder=[1, 2, 4, 8])
    for rows in (4, 7, 1):
        yield f(world.randn(rows, 3), world.randn(rows, 3))
    world.diagnose(f, world.randn(2, 3), world.randn(2, 3))


@program("exponential moving average in a buffer", tags=["basics", "state"])
def moving_average(world: World):
    class Normaliser(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("peak", torch.zeros(4))

        def forward(self, x):
            self.peak.mul_(0.9).add_(0.1 * x.abs().amax(0))
            return x / (self.peak + 1e-3)

    f = world.graphed(Normaliser().to(world.device), ladder=[4])
    for _ in range(4):
        yield f(world.randn(4, 4))
    world.diagnose(f, world.randn(4, 4))
