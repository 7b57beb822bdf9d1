"""A refusal names the user's line, what the user called there and how to avoid it, and does so once."""

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Beta, Categorical, MultivariateNormal, Normal
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from contract.steps import WIDTH, randn, same
from ostinato.graphs import graphed

HERE = Path(__file__).name
LADDER = [2, 4]


def encoder(**options):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 1, **options)


def x(device):
    return (randn(3, WIDTH, device=device),)


def sequences(device):
    return (randn(3, 5, WIDTH, device=device),)


def padded(device):
    is_padding = torch.arange(5, device=device).expand(3, 5) > 2
    return randn(3, 5, WIDTH, device=device), is_padding


def classes(device):
    return (torch.arange(3, device=device),)


class Step(nn.Module):
    """A function with a module of its own, in training mode or not."""

    def __init__(self, function, training=False, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(5))
        self.function = function
        self.train(training)

    def forward(self, *args):
        return self.function(self, *args)


def norm(momentum):
    return Step(lambda own, a: own.norm(a), True, norm=nn.BatchNorm1d(WIDTH, momentum=momentum))


def masked(is_causal):
    return Step(lambda own, a: own.encoder(a, mask=own.mask, is_causal=is_causal), encoder=encoder())


def left_out(**options):
    return Step(lambda own, a, b: own.encoder(a, src_key_padding_mask=b), encoder=encoder(**options))


def packed(own, a):
    return own.gru(pack_padded_sequence(a, torch.full((len(a),), 5), batch_first=True))[0].data


def clipped(own, a):
    nn.utils.clip_grad_norm_([own.layer.bias], 1.0, error_if_nonfinite=True)
    return a * 2


def clipping():
    step = Step(clipped, layer=nn.Linear(2, 2))
    step.layer.bias.grad = torch.ones(2)
    return step


def indexed(a):
    return a[:, [0, 2]]


def cut(a):
    return a[:, : a.new_full((), 3).long()]


WRONG = {
    "momentum": (lambda: norm(None), x, "BatchNorm1d(momentum=None)", "give it a momentum"),
    "mask": (lambda: masked(None), sequences, "nn.Transformer with a mask", "is_causal=True"),
    "padding": (left_out, padded, "TransformerEncoder(src_key_padding_mask=)", "enable_nested_tensor=False"),
    "categorical": (
        lambda: lambda a: Categorical(logits=a, validate_args=True).probs,
        x,
        "Categorical",
        "validate_args=False",
    ),
    "normal": (
        lambda: lambda a: Normal(a, a.exp(), validate_args=True).mean,
        x,
        "Normal",
        "validate_args=False",
    ),
    "beta": (
        lambda: lambda a: Beta(a.exp(), a.exp(), validate_args=True).mean,
        x,
        "Beta",
        "validate_args=False",
    ),
    "log_prob": (
        *(lambda: lambda a: Normal(a, a.exp(), validate_args=True).log_prob(a), x),
        *("Normal", "validate_args=False"),
    ),
    "number": (
        *(lambda: lambda a: Normal(a, 1.0, validate_args=False).mean, x),
        *("Normal(...) with a number", "torch.ones_like"),
    ),
    "covariance": (
        lambda: (
            lambda a: MultivariateNormal(a, torch.eye(WIDTH, device=a.device), validate_args=False).log_prob(
                a
            )
        ),
        *(x, "MultivariateNormal", "scale_tril="),
    ),
    "packed": (
        lambda: Step(packed, gru=nn.GRU(WIDTH, WIDTH, batch_first=True)),
        *(sequences, "pack_padded_sequence", "padded rows"),
    ),
    "clip": (clipping, x, "clip_grad_norm_", "leave the option out"),
    "nll": (lambda: lambda a: F.gaussian_nll_loss(a, a, a.exp(), reduction="none"), x, "gaussian_nll", "0.5"),
    "one_hot": (lambda: lambda a: F.one_hot(a), classes, "one_hot", "num_classes="),
    "unique": (lambda: lambda a: a + torch.unique(a).sum(), classes, "unique", "outside"),
    "list": (lambda: indexed, x, "tensor[list]", "before the capture"),
    "bound": (lambda: cut, x, "tensor[start:end]", "mask"),
    "inverse": (
        lambda: lambda a: torch.linalg.inv(a[:, :, None] @ a[:, None]),
        *(x, "torch.linalg", "inv_ex"),
    ),
}


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="ostinato.graphs")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "ostinato.graphs"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRONG)
def test_the_call_and_its_remedy_are_named_once_with_the_users_line(device, name, warnings):
    if name == "packed" and device.type == "cuda":
        pytest.skip("constant lengths in host memory can be captured there")
    make, arguments, called, remedy = WRONG[name]
    step, given = make(), arguments(device)
    step = step.to(device) if isinstance(step, nn.Module) else step
    f = graphed(step, ladder=LADDER)
    with torch.no_grad():
        wanted = step(*given)
        for _ in range(3):
            torch.testing.assert_close(f(*given), wanted)
    [told] = warnings()
    for part in (called, remedy, HERE, *map(str, LADDER)):
        assert part in told, told
    found = f.doctor(*given)
    assert any(called in each.what and remedy in each.why for each in found.obstacles), found
    assert all(each.where is not None and HERE in each.where for each in found.obstacles), found
    assert not found.causes, "what a line says is not repeated"


RIGHT = {
    "momentum": (lambda: norm(0.1).eval(), x),
    "mask": (lambda: masked(True), sequences),
    "padding": (lambda: left_out(enable_nested_tensor=False), padded),
    "categorical": (lambda: lambda a: Categorical(logits=a, validate_args=False).probs, x),
    "normal": (lambda: lambda a: Normal(a, torch.ones_like(a), validate_args=False).log_prob(a), x),
    "covariance": (
        lambda: (
            lambda a: MultivariateNormal(
                a, scale_tril=torch.eye(WIDTH, device=a.device), validate_args=False
            ).log_prob(a)
        ),
        x,
    ),
    "one_hot": (lambda: lambda a: F.one_hot(a, 4), classes),
    "inverse": (lambda: lambda a: torch.linalg.inv_ex(a[:, :4, None] @ a[:, None, :4])[0].tanh(), x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RIGHT)
def test_the_remedies_are_captured(device, name, warnings):
    make, arguments = RIGHT[name]
    step, given = make(), arguments(device)
    step = step.to(device) if isinstance(step, nn.Module) else step
    f = graphed(step, ladder=LADDER)
    with torch.no_grad():
        torch.testing.assert_close(f(*given), step(*given))
    assert f.report().replays == 1, f.report().failures
    assert warnings() == []


def test_one_cause_at_several_sizes_and_calls_is_one_warning(device, warnings):
    f = graphed(lambda a, b: a * b.sum().item(), ladder=[1, 2, 4, 8], shared=["b"])
    for rows in (1, 3, 8, 20):
        f(randn(rows, WIDTH, device=device), randn(2, device=device))
    f.capture(randn(3, 5, device=device), randn(2, device=device))  # calls of another kind
    assert len([line for line in warnings() if "item" in line]) == 1


def test_causes_that_differ_are_told_one_by_one(device, warnings):
    def step(a):
        return a * (a.sum().item() if len(a) > 2 else a.max().tolist())

    graphed(step, ladder=LADDER)(randn(3, WIDTH, device=device))
    first, second = warnings()
    assert "item" in first
    assert "tolist" in second


def test_a_step_made_for_one_size_is_told_so_with_its_line(device, warnings):
    offset = randn(3, WIDTH, device=device)

    def step(a):
        return a + offset  # made for three rows

    f = graphed(step, ladder=LADDER)
    assert same(f(offset), offset + offset)
    [told] = warnings()
    assert f"{HERE}:{step.__code__.co_firstlineno + 1} in step" in told
    assert "must be an argument" in told


def test_where_only_libraries_run_the_call_itself_is_the_users_line(device, warnings):
    layers = nn.Sequential(nn.Flatten(0), nn.Linear(3 * WIDTH, 2)).to(device)
    f = graphed(layers, ladder=LADDER)
    f(randn(3, WIDTH, device=device))  # this line
    [told] = warnings()
    assert "# this line" in told
    assert "linear.py" in told


def test_a_library_is_named_beside_the_users_line(device, warnings):
    cell = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 6, [2, 4]).to(device)
    rows, labels = randn(3, WIDTH, device=device), torch.tensor([0, 3, 5], device=device)
    f = graphed(lambda a, b: cell(a, b).output, ladder=LADDER)
    f(rows, labels)
    [told] = warnings()
    assert "AdaptiveLogSoftmaxWithLoss" in told
    assert "log_prob()" in told
    assert HERE in told
