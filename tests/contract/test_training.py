"""Whole training steps from graphs, beside the loop that everybody writes: the same losses, bit for bit."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from contract.training_loops import (
    VOCABULARY,
    as_rung,
    captured,
    cross_entropy,
    fast_options,
    make_batches,
    make_model,
    replays,
    same_parameters,
    train_eagerly,
    twins,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from ostinato.graphs import AddressError, BatchError, CaptureError, ConfigError, GraphPool

STEPS = 25
LADDER = [4, 8]
LENGTHS = [8, 3, 4, 7, 5]


def lengths(steps: int) -> list[int]:
    return [LENGTHS[i % len(LENGTHS)] for i in range(steps)]


def schedule(i: int) -> float:
    return 0.02 * (0.5 + 0.5 * math.cos(i / 10))


def optimizer_of(name: str, model: nn.Module, device: torch.device, *, reference: bool = False):
    """As users make them; the reference is of the kind that a captured step makes of it."""
    tensor = {"lr": torch.tensor(0.02, dtype=torch.float64 if device.type == "cpu" else None, device=device)}
    fused = {"fused": True, **(tensor if reference else {"lr": 0.02})} if reference else {"lr": 0.02}
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=0.9, dampening=0.3, nesterov=False, **fused)
    if reference and device.type == "cuda":
        fused["capturable"] = True
    return torch.optim.AdamW(model.parameters(), **fused)


def run_both(device, *, steps=STEPS, optimizer="adamw", dropout=0.0, varying=False, checkpointed=False, **settings):
    """Losses and models of both, from the same seed, on the same padded batches."""
    ladder = LADDER if varying else [8]
    how = (lambda block, x: checkpoint(block, x, use_reentrant=False)) if checkpointed else None
    ours, theirs = twins(make_model(device, dropout=dropout, checkpoint=how))
    batches = make_batches(device, lengths(steps) if varying else [8] * steps)
    step = captured(ours, optimizer_of(optimizer, ours, device), ladder=ladder, **settings)
    torch.manual_seed(11)
    losses = []
    for number, (inputs, targets) in enumerate(batches):
        losses.append(float(step(inputs, targets, last=number + 1 == len(batches))))
    torch.manual_seed(11)
    eager = train_eagerly(
        theirs,
        optimizer_of(optimizer, theirs, device, reference=True),
        [as_rung(batch, ladder) for batch in batches],
        **settings,
    )
    return step, losses, eager, ours, theirs


OBSTACLES = {
    "adamw": {},
    "sgd with momentum": {"optimizer": "sgd"},
    "clipping": {"clip_norm": 0.3},
    "schedule": {"schedule": schedule},
    "accumulation": {"accumulate": 4},
    "dropout": {"dropout": 0.2},
    "lengths": {"varying": True},
    "checkpointing": {"checkpointed": True, "dropout": 0.2},
    "all": {
        **{"clip_norm": 0.3, "schedule": schedule, "accumulate": 4, "dropout": 0.2},
        **{"varying": True, "checkpointed": True},
    },
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_losses_equal_eager_training(device, obstacle):
    step, losses, eager, ours, theirs = run_both(device, **OBSTACLES[obstacle])
    assert losses == eager
    assert same_parameters(ours, theirs)
    accumulate = OBSTACLES[obstacle].get("accumulate", 1)
    assert replays(step) == STEPS - accumulate, step.report()


@pytest.mark.slow
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_losses_equal_eager_training_over_200_steps(device, obstacle):
    step, losses, eager, ours, theirs = run_both(device, steps=200, **OBSTACLES[obstacle])
    assert losses == eager
    assert same_parameters(ours, theirs)
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])
