"""The contract of `contract/test_training.py`, on CUDA, and what only a GPU shows."""

import gc

import pytest
import torch

from contract.test_training import *  # noqa: F403
from contract.test_training import OBSTACLES, optimizer_of, run_both
from contract.training_loops import captured, make_batches, make_model, replays, train_eagerly, twins
from ostinato.graphs import CaptureError


def adamw(model, device, **more):
    rate = torch.tensor(1e-3, device=device)
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True, **more)


def test_a_replay_reads_nothing_back(device):
    model = make_model(device)
    step = captured(
        model, torch.optim.AdamW(model.parameters()), clip_norm=1.0, schedule=lambda i: 1e-3 / (i + 1)
    )
    batches = make_batches(device, [8] * 6)
    step(*batches[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[1:]:
            step(*batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert replays(step) == 5


def test_a_loss_that_is_still_held_is_named_and_training_goes_on(device):
    """Autograd has tied gradients to the default stream as long as its graph lives."""
    model = make_model(device)
    step = captured(model, torch.optim.AdamW(model.parameters()))
    batches = make_batches(device, [8] * 4)
    held = model(batches[0][0]).sum()
    with pytest.raises(CaptureError, match="still held"):
        step(*batches[0])
    del held
    for batch in batches[1:]:
        step(*batch)
    assert replays(step) == 2


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_200_steps_are_exact(device, obstacle):
    _, losses, eager, ours, theirs = run_both(device, steps=200, **OBSTACLES[obstacle])
    assert losses == eager
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.fixture(scope="module")
def noise(device):
    """How far two eager runs of 200 steps in bf16 are apart, the second with another order of additions."""
    batches = make_batches(device, [8] * 200)
    flipped = [(inputs.flip(0), targets.flip(0)) for inputs, targets in batches]
    one, other = twins(make_model(device))
    losses, others = (
        train_eagerly(
            model, optimizer_of("adamw", model, device, reference=True), given, autocast=torch.bfloat16
        )
        for model, given in ((one, batches), (other, flipped))
    )
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_200_steps_in_bf16_are_within_the_noise_of_two_eager_runs(device, obstacle, noise):
    step, losses, eager, *_ = run_both(device, steps=200, autocast=torch.bfloat16, **OBSTACLES[obstacle])
    gap = max(abs(a - b) for a, b in zip(losses, eager, strict=True))
    assert gap <= noise + 1e-6
    assert replays(step) == 200 - OBSTACLES[obstacle].get("accumulate", 1)


def test_a_compiled_model_is_captured_compiled(device):
    batches = make_batches(device, [32] * 20, rows=4)
    ours, theirs = twins(make_model(device, width=64, layers=2))
    step = captured(torch.compile(ours), torch.optim.AdamW(ours.parameters()), ladder=[32])
    losses = [float(step(*batch)) for batch in batches]
    assert losses == pytest.approx(train_eagerly(theirs, adamw(theirs, device), batches), rel=1e-3)
    assert replays(step) == 19


def test_model_and_loss_compiled_as_one_are_captured(device):
    batches = make_batches(device, [32] * 20, rows=4)
    ours, theirs = twins(make_model(device, width=64, layers=2))
    step = captured(ours, torch.optim.AdamW(ours.parameters()), ladder=[16, 32], compile=True)
    losses = [float(step(*batch)) for batch in batches]
    assert losses == pytest.approx(train_eagerly(theirs, adamw(theirs, device), batches), rel=1e-3)
    assert replays(step) == 19
    longer = make_batches(device, [40], rows=4)[0]
    assert float(step(*longer)) > 0, "eagerly, and without a compilation"
    assert step.report().eager_steps["larger-than-max"] == 1


@pytest.mark.parametrize(
    "size", [{"width": 512, "length": 512, "rows": 16}, {"width": 2048, "length": 64, "rows": 1}]
)
def test_memory_is_that_of_eager_training(device, size):
    """Peak while training from graphs of three lengths beside that of the eager loop: where activations
    count, and where gradients do. Libraries have a workspace for each stream."""

    def peak(run):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_reserved(device)
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved(device) - before

    length = size["length"]
    batches = make_batches(device, [length] * 4, rows=size["rows"])
    ours, theirs = twins(make_model(device, width=size["width"], layers=4))
    eager = peak(lambda: train_eagerly(theirs, adamw(theirs, device), batches))

    def train():
        step = captured(ours, torch.optim.AdamW(ours.parameters()), ladder=[length // 4, length // 2, length])
        for batch in batches:
            step(*batch)

    assert peak(train) < 1.2 * eager + 160 * 2**20
