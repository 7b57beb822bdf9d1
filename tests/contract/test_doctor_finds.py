"""`doctor` on ordinary programs: nothing is said of right ones, planted hazards are named with their line."""

import os
import random
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from contract.steps import WIDTH, randn
from ostinato.graphs import graphed

HERE = Path(__file__).name
LADDER = [2, 4]
SCALE = torch.linspace(0.5, 2.0, WIDTH)
PLACES = torch.tensor([0, 2, 5])
seconds = time.perf_counter
OWN_RANDOM, OWN_NUMPY = random.Random(3), np.random.default_rng(3)


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.mlp = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU())
        self.down = nn.Linear(16, WIDTH)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(self.mlp(x))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return torch.einsum("be,eio,bi->bo", weights, self.experts, x)


class Last(nn.Module):
    """The last output of a recurrent layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0][:, -1]


class Counting(nn.Module):
    """Counts its calls, which nothing reads."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


class Average(nn.Module):
    """Keeps a number in a buffer, row by row."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.full((WIDTH,), 0.5))

    def forward(self, x):
        return x.lerp(x.roll(1, 1), self.weight)


def images(device):
    return randn(3, 3, 8, 8, device=device)


def rows(device):
    return randn(3, WIDTH, device=device)


def sequences(device):
    return randn(3, 5, WIDTH, device=device)


def tokens(device):
    return torch.arange(15, device=device).view(3, 5) % 11


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def softmax_by_hand(x):
    e = (x - x.max(-1, keepdim=True).values).exp()
    return e / e.sum(-1, keepdim=True)


def positions(x):
    angles = torch.arange(x.size(1), device=x.device)[:, None] / 10000 ** (
        torch.arange(0, WIDTH, 2, device=x.device) / WIDTH
    )
    return x + torch.cat([angles.sin(), angles.cos()], -1)


def causal(x):
    mask = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).tril()
    scores = (x @ x.mT).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ x


def zero_below(x):
    y = x.clone()
    y[x < 0] = 0.0
    return y


RIGHT = {
    "mlp": (lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 3)), rows),
    "block": (Block, sequences),
    "encoder": (encoder, sequences),
    "experts": (Experts, rows),
    "counting": (Counting, rows),
    "average": (Average, rows),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval(), images),
    "pool": (lambda: nn.Sequential(nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()), images),
    "resize": (lambda: lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), images),
    "group norm": (lambda: nn.GroupNorm(1, 3), images),
    "lstm": (lambda: Last(nn.LSTM(WIDTH, 4, batch_first=True)), sequences),
    "gru": (lambda: Last(nn.GRU(WIDTH, 4, batch_first=True)), sequences),
    "mask write": (lambda: zero_below, rows),
    "embedding": (lambda: nn.Sequential(nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)), tokens),
    "bag": (lambda: nn.EmbeddingBag(11, WIDTH), tokens),
    "softmax": (lambda: softmax_by_hand, rows),
    "positions": (lambda: positions, sequences),
    "causal": (lambda: causal, sequences),
    "one_hot": (lambda: lambda x: F.one_hot(x, 11).float().mean(1), tokens),
    "top_k": (lambda: lambda x: x.topk(3, -1), rows),
    "sort": (lambda: lambda x: x.sort(-1).values.diff(dim=-1), rows),
    "where": (lambda: lambda x: torch.where(x > 0, x, x.exp() - 1), rows),
    "clamp": (lambda: lambda x: x.clamp(-1, 1).pow(2).sum(-1), rows),
    "masked mean": (lambda: lambda x: (x * (x > 0)).sum(1) / (x > 0).sum(1).clamp(min=1), rows),
    "gather": (lambda: lambda x: x.gather(-1, x.argsort(-1)), rows),
    "index": (lambda: (lambda index: lambda x: x[:, index.to(x.device)])(PLACES), rows),
    "slices": (lambda: lambda x: x[..., ::2] * x[:, None, 1::2].sum(1), rows),
    "categorical": (lambda: lambda x: Categorical(logits=x, validate_args=False).entropy(), rows),
    "normal": (lambda: lambda x: Normal(x, x.exp(), validate_args=False).log_prob(x * 2), rows),
    "inverse": (lambda: lambda x: torch.linalg.inv_ex(torch.diag_embed(x.exp()))[0], rows),
    "dictionary": (lambda: lambda x: {"double": x * 2, "half": {"of": x / 2}}, rows),
    "autocast": (lambda: nn.Linear(WIDTH, WIDTH), rows),
    "loop": (lambda: lambda x: torch.stack([x * factor for factor in (1.0, 0.5, 2.0)], 1), rows),
    "shape": (lambda: lambda x: x / x.shape[1] ** 0.5, rows),
    "environment": (lambda: lambda x: x * float(os.environ.get("NO_SUCH_SCALE", "2")), rows),
    "smoothed": (
        lambda: (
            lambda x: F.cross_entropy(
                x, x.argmax(1), x.new_ones(WIDTH), label_smoothing=0.1, reduction="none"
            )
        ),
        rows,
    ),
    "formatted": (lambda: lambda x: x * len(f"{x.shape} of {x.dtype}"), rows),
}


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_said_of_right_programs(device, name):
    make, arguments = RIGHT[name]
    torch.manual_seed(0)
    step = make()
    step = step.to(device) if isinstance(step, nn.Module) else step
    if name == "index":
        PLACES.data = PLACES.to(device)
    found = graphed(step, ladder=LADDER).doctor(arguments(device))
    assert found.is_healthy, found
    assert not found.obstacles + found.causes + found.notes, found


class Every(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.start, self.random = 0, time.time(), random.Random(1)
        self.numpy = np.random.default_rng(1)
        self.register_buffer("seen", torch.zeros(WIDTH))


def clock(own, x):
    return x * 2 if time.time() - own.start > 60 else x  # here


def date(own, x):
    return x * (2 if datetime.now().hour > 30 else 1)  # here


def python_random(own, x):
    return x * 2 if random.random() < 2 else x  # here


def own_random(own, x):
    return x * 2 if own.random.randint(0, 3) < 9 else x  # here


def global_own_random(own, x):
    return x * 2 if OWN_RANDOM.random() < 9 else x  # here


def numpy_random(own, x):
    return x * 2 if np.random.rand() < 9 else x  # here


def own_numpy(own, x):
    return x * 2 if own.numpy.random() < 9 else x  # here


def global_own_numpy(own, x):
    return x * 2 if OWN_NUMPY.random() < 9 else x  # here


def file(own, x):
    with open(os.devnull) as opened:  # here
        return x * (1 + len(opened.read()))


def path(own, x):
    return x * (1 + len(Path(os.devnull).read_text()))  # here


def item(own, x):
    return x * x.max().item()  # here


def branch(own, x):
    return x * 2 if x.mean() > 0 else x  # here


def loop(own, x):
    for _ in range(int(x.abs().max())):  # here
        x = x + 1
    return x


def listed(own, x):
    return x * x.sum(1).tolist()[0]  # here


def array(own, x):
    return x * float(x.detach().cpu().numpy().max())  # here


def printed(own, x):
    print("largest", x.max())  # here
    return x * 2


def told(own, x):
    own.told = f"{x.max():.3f}"  # here
    return x * 2


def asserted(own, x):
    assert not x.isnan().any()  # here
    return x * 2


def masked(own, x):
    return x + x[x > 0].mean()  # here


def counted(own, x):
    return x / x.nonzero().shape[0]  # here


def unique(own, x):
    return x + x.round().unique().sum()  # here


def by_list(own, x):
    return x[:, [0, 3, 1]]  # here


def by_array(own, x):
    return x[:, np.array([0, 3, 1])]  # here


def up_to(own, x):
    return x[:, : x.abs().sum().long() % 7 + 1]  # here


def at(own, x):
    return x[:, x.abs().sum().long() % 7]  # here


def constant(own, x):
    return x * torch.tensor([1.0] * WIDTH, device=x.device)  # here


def number(own, x):
    return x * torch.tensor(2.0, device=x.device)  # here


def from_array(own, x):
    return x * torch.from_numpy(np.ones(WIDTH, np.float32)).to(x.device)  # here


def to_host(own, x):
    return x.cpu().to(x.device) * 2  # here


def validated(own, x):
    return Categorical(logits=x, validate_args=True).entropy()  # here


def repeated(own, x):
    return x + x.new_ones(2).repeat_interleave(x.abs().long()[0, :2] * 0 + 1).sum()  # here


def inverted(own, x):
    return torch.linalg.inv(torch.diag_embed(x.exp()))  # here


def resized(own, x):
    own.seen.resize_(2 * WIDTH)  # here
    return x * 2


def compared(own, x):
    return x * 2 if torch.equal(x, x + 1) else x  # here


def timer_used(own, x):
    started = time.perf_counter()  # here
    own.took = time.perf_counter() - started  # here
    return x * 2 if own.took < 60 else x


def timer_passed_on(own, x):
    started = time.perf_counter()  # here
    own.took = time.perf_counter() - started  # here
    return x + started


def timer_of_another_name(own, x):
    own.took = time.perf_counter() - own.start
    return x + seconds()


def smoothed(own, x):
    classes = torch.zeros(len(x), dtype=torch.long, device=x.device)
    return x + F.cross_entropy(x, classes, weight=own.seen + 1, label_smoothing=0.1)  # here


HAZARDS = [
    smoothed,
    *(clock, timer_passed_on, date, python_random, own_random, global_own_random, numpy_random),
    own_numpy,
    *(global_own_numpy, file, path, item, branch, loop, listed, array, printed),
    *(told, asserted, masked, counted, unique, by_list, by_array, up_to, at, constant, number, from_array),
    *(to_host, validated, repeated, inverted, resized, compared),
]


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda hazard: hazard.__name__)
def test_a_planted_hazard_is_named_with_its_line(device, hazard, capsys):
    kind = type("Step", (Every,), {"forward": hazard})
    found = graphed(kind().to(device), ladder=LADDER).doctor(rows(device))
    assert found.obstacles, found
    assert not found.is_healthy or (hazard is resized and device.type == "cuda"), "CUDA lets it grow once"
    for obstacle in found.obstacles:
        assert HERE in obstacle.where
        assert f"in {hazard.__name__}: " in obstacle.where
        assert obstacle.where.endswith("# here")
        assert len(obstacle.why) > 20
    assert not found.causes or not any(obstacle.is_refused for obstacle in found.obstacles)


def measured(own, x):
    begun = time.perf_counter()
    y = x * 2
    own.took = time.perf_counter() - begun
    return y


def measured_twice(own, x):
    now = time.monotonic_ns()
    y = x * 2
    middle = time.monotonic_ns()
    own.log["first"] = own.last = (middle - now) / 1e6
    own.log["second"] = (time.monotonic_ns() - middle) / 1e6
    return y


def stamped(own, x):
    own.at = time.time()
    return x * 2


@pytest.mark.parametrize("step", [measured, measured_twice], ids=lambda step: step.__name__)
def test_a_time_that_is_only_left_in_python_is_a_note(device, step):
    found = graphed(InState(step).to(device), ladder=LADDER).doctor(rows(device))
    assert found.is_healthy, found
    assert not found.obstacles + found.causes
    assert all(f"in {step.__name__}" in note and "time." in note for note in found.notes)
    assert found.notes


def test_a_time_of_which_a_step_does_more_is_named(device):
    for step in (timer_used, timer_of_another_name, stamped):
        found = graphed(InState(step).to(device), ladder=LADDER).doctor(rows(device))
        assert not found.is_healthy, step


class Extrema(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("least", torch.tensor(float("inf")))

    def forward(self, x):
        self.least.copy_(torch.minimum(self.least, x.abs().min() + 1))
        return x * 2


class InState(nn.Module):
    """Keeps something in Python from call to call."""

    def __init__(self, forward):
        super().__init__()
        self.calls, self.history, self.numbers, self.step = 0, [], iter([1.0, 2.0, 3.0] * 20), forward
        self.log, self.start = {}, time.perf_counter()

    def forward(self, x):
        return self.step(self, x)


def every_tenth(own, x):
    own.calls += 1  # here
    return x * 2 if own.calls % 10 == 0 else x


def warm_up(own, x):
    own.calls += 1  # here
    return x * min(1.0, own.calls / 10)


def appended(own, x):
    own.history.append(len(own.history))  # here
    return x * len(own.history)


def next_number(own, x):
    return x * next(own.numbers)  # here


@pytest.mark.parametrize("step", [every_tenth, warm_up, appended, next_number], ids=lambda s: s.__name__)
def test_state_in_python_is_named_with_the_line_that_changes_it(device, step):
    found = graphed(InState(step), ladder=LADDER).doctor(rows(device))
    assert not found.is_healthy
    [cause] = found.causes
    assert f"in {step.__name__}: " in cause, cause
    assert "# here" in cause
    assert "outside" in cause


def test_padding_that_enters_an_extremum_is_found(device):
    found = graphed(Extrema().to(device), ladder=LADDER).doctor(rows(device))
    assert not found.is_healthy
    [cause] = found.causes
    assert "depends on the batch" in cause


def test_a_tensor_without_a_device_is_no_obstacle_and_noted_where_there_is_no_gpu(device):
    if device.type != "cpu":
        pytest.skip("torch itself refuses it")

    def step(x):
        return x + torch.arange(WIDTH)  # here

    found = graphed(step, ladder=LADDER).doctor(rows(device))
    assert found.is_healthy
    [note] = found.notes
    assert "# here" in note
    assert "torch.arange" in note
    assert note in str(found)


def test_what_libraries_read_for_themselves_does_not_count(device):
    import logging

    def step(x):
        logging.getLogger("somebody").warning("a line of a log, with its time")
        return x * 2

    found = graphed(step, ladder=LADDER).doctor(rows(device))
    assert found.is_healthy, found
