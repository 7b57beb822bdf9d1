"""A loss function that returns more than the loss: a training step returns it in the same structure."""

import copy
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from contract.training_loops import (
    VOCABULARY,
    captured,
    cross_entropy,
    make_batches,
    make_model,
    replays,
    twins,
)
from ostinato.graphs import CaptureOptions, ConfigError


def options():
    return CaptureOptions(freeze_gc=False)


def real_accuracy(logits, targets):
    is_real = targets != -100
    return ((logits.argmax(-1) == targets) & is_real).sum() / is_real.sum()


@dataclass
class Report:
    loss: torch.Tensor
    metrics: dict[str, Any]
    name: str = "train"


Pair = namedtuple("Pair", ["loss", "accuracy"])

STRUCTURES = {
    "tuple": lambda loss, logits, accuracy: (loss, accuracy),
    "named tuple": lambda loss, logits, accuracy: Pair(loss, accuracy),
    "list": lambda loss, logits, accuracy: [loss, {"accuracy": accuracy}, None],
    "dictionary": lambda loss, logits, accuracy: {"accuracy": accuracy, "loss": loss, "note": "x"},
    "dataclass": lambda loss, logits, accuracy: Report(loss, {"accuracy": accuracy, "logits": logits}),
    "with a length": lambda loss, logits, accuracy: (loss, logits, logits.argmax(-1)),
}


def returning(build):
    def loss_fn(logits, targets):
        return build(cross_entropy(logits, targets), logits, real_accuracy(logits, targets))

    return loss_fn


def eagerly(model, optimizer, batches, loss_fn):
    """The usual loop; what it returns is as it would be collected."""
    found = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        result = loss_fn(model(inputs), targets)
        loss = result if isinstance(result, torch.Tensor) else None
        if loss is None:
            loss = result["loss"] if isinstance(result, dict) else getattr(result, "loss", None)
            loss = result[0] if loss is None else loss
        loss.backward()
        found.append(torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), result))
        if isinstance(result, Report):
            found[-1] = copy.deepcopy(
                Report(loss.detach(), {k: v.detach() for k, v in result.metrics.items()}, result.name)
            )
        optimizer.step()
    return found


def assert_alike(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert not found.requires_grad
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_alike(found[key], expected[key])
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    elif isinstance(expected, Report):
        assert_alike(vars(found), vars(expected))
    else:
        assert found == expected


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)


@pytest.mark.parametrize("name", STRUCTURES)
def test_what_is_returned_has_the_same_structure_and_stays_valid(device, name):
    """The first step, replays, shorter batches, longer ones, other rows."""
    ours, theirs = twins(make_model(device))
    loss_fn = returning(STRUCTURES[name])
    step = captured(ours, adamw(ours), loss_fn, ladder=[4, 8], options=options())
    batches = make_batches(device, [7, 8, 4, 3, 8, 11]) + make_batches(device, [8], rows=3)
    collected = [step(*batch) for batch in batches]
    for found, expected in zip(collected, eagerly(theirs, adamw(theirs), batches, loss_fn), strict=True):
        assert_alike(found, expected)
    assert replays(step) == 4
    assert step.report().eager_steps == {"first-call": 1, "larger-than-max": 1, "unseen-signature": 1}


def test_each_micro_batch_of_an_accumulation_returns_its_results(device):
    ours, theirs = twins(make_model(device))
    loss_fn = returning(STRUCTURES["dictionary"])
    step = captured(ours, adamw(ours), loss_fn, accumulate=2)
    other = adamw(theirs)
    batches = make_batches(device, [8] * 6)
    collected = [step(*batch) for batch in batches]
    for number, (found, (inputs, targets)) in enumerate(zip(collected, batches, strict=True)):
        expected = loss_fn(theirs(inputs), targets)
        (expected["loss"] / 2).backward()
        assert found["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-4)
        assert found["accuracy"].item() == pytest.approx(expected["accuracy"].item())
        if number % 2:
            other.step()
            other.zero_grad()
    assert replays(step) == 4


@pytest.mark.parametrize(
    ("kind", "metric"),
    [
        ("a mean over all", lambda logits, targets: (logits.argmax(-1) == targets).float().mean()),
        ("a sum of all", lambda logits, targets: logits.square().sum()),
        ("a mean of all", lambda logits, targets: logits.mean((1, 2))),
        ("the last position", lambda logits, targets: logits[:, -1]),
        ("a number of the shape", lambda logits, targets: targets.numel()),
        ("no length any more", lambda logits, targets: logits.flatten(0, 1)),
        ("always zero at first", lambda logits, targets: (logits.abs() > 1e6).float().mean()),
    ],
)
def test_results_that_count_padding_prevent_padding(device, kind, metric):
    ours, theirs = twins(make_model(device))

    def loss_fn(logits, targets):
        return cross_entropy(logits, targets), metric(logits, targets)

    step = captured(ours, adamw(ours), loss_fn, ladder=[4, 8], options=options())
    batches = make_batches(device, [8, 4, 3, 6, 8])
    found = [step(*batch) for batch in batches]
    for one, other in zip(found, eagerly(theirs, adamw(theirs), batches, loss_fn), strict=True):
        assert_alike(one, other)
    assert replays(step) == 2
    assert step.report().eager_steps["padding-disabled"] == 2


def test_a_number_that_python_counts_is_in_no_graph(device, caplog):
    ours, theirs = twins(make_model(device))

    def make_loss():
        calls = []

        def loss_fn(logits, targets):
            calls.append(1)
            return cross_entropy(logits, targets), len(calls)

        return loss_fn

    step = captured(ours, adamw(ours), make_loss(), options=options())
    batches = make_batches(device, [8] * 4)
    found = [step(*batch) for batch in batches]
    expected = eagerly(theirs, adamw(theirs), batches, make_loss())
    assert [float(loss) for loss, _ in found] == pytest.approx(
        [float(loss) for loss, _ in expected], rel=1e-4
    )
    assert replays(step) == 0
    assert len(caplog.messages) == 1
    assert "capture-failed" in caplog.text
    counts = [count for _, count in found]
    assert counts == sorted(set(counts)), "each step runs Python"


def test_a_result_that_is_a_parameter_or_an_argument_is_of_its_step(device):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.scale = make_model(device), nn.Parameter(torch.ones((), device=device))

        def forward(self, ids):
            return self.model(ids) * self.scale

    for make in (adamw, lambda m: torch.optim.Adagrad(m.parameters(), lr=0.02)):
        ours, theirs = twins(Scaled())

        def of(model):
            return lambda logits, targets: (cross_entropy(logits, targets), model.scale, targets)

        step = captured(ours, make(ours), of(ours), options=options())
        batches = make_batches(device, [8] * 4)
        found = [step(*batch) for batch in batches]
        for one, other in zip(found, eagerly(theirs, make(theirs), batches, of(theirs)), strict=True):
            assert_alike(one, other)
        assert replays(step) == 3


@pytest.mark.slow
def test_what_a_model_of_transformers_returns(device):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    ours, theirs = twins(transformers.LlamaForCausalLM(config).to(device))

    def without_cache(outputs, targets):
        return type(outputs)(loss=outputs.loss, logits=outputs.logits)

    step, other = captured(ours, adamw(ours), without_cache, options=options()), adamw(theirs)
    for ids, _ in make_batches(device, [8] * 4):
        inputs = {"input_ids": ids, "labels": ids.clone()}
        found, expected = step(inputs, None), without_cache(theirs(**inputs), None)
        assert type(found) is type(expected)
        assert list(found) == ["loss", "logits"]
        torch.testing.assert_close(found.loss, expected.loss.detach(), rtol=1e-3, atol=0)
        torch.testing.assert_close(found["logits"], expected.logits.detach(), rtol=1e-2, atol=1e-3)
        other.zero_grad()
        expected.loss.backward()
        other.step()
    assert replays(step) == 3


@pytest.mark.parametrize("returned", [(), {"accuracy": torch.zeros(())}, 1.0, (1.0, torch.zeros(()))])
def test_what_has_no_loss_is_refused(device, returned):
    model = make_model(device)
    with pytest.raises(ConfigError, match="without a loss"):
        captured(model, adamw(model), lambda logits, targets: returned)(*make_batches(device, [8])[0])
