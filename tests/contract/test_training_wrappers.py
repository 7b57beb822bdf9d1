"""Models and optimizers as libraries wrap them: right, or refused by name and as if never touched."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from contract.training_loops import (
    captured,
    cross_entropy,
    make_batches,
    make_model,
    replays,
    same_parameters,
    train_eagerly,
    twins,
)
from ostinato.graphs import CaptureOptions, ConfigError, graphed, make_graphed_callables


def options():
    return CaptureOptions(freeze_gc=False)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02)


@pytest.fixture
def alone(device):
    """A process group of this process."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_refused_and_untouched(device, ours, theirs, match):
    mine, other = adamw(ours), adamw(theirs)
    with pytest.raises(ConfigError, match=match):
        captured(ours, mine)
    batches = make_batches(device, [8] * 3)
    assert train_eagerly(ours, mine, batches) == train_eagerly(theirs, other, batches)
    assert mine.param_groups[0]["lr"] == 0.02


def sharded_twins(device):
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(device.type, (1,))
    models = twins(make_model(device))
    for model in models:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return models


def test_parameters_that_fully_shard_spreads_are_refused_by_name(device, alone):
    assert_refused_and_untouched(device, *sharded_twins(device), "is a DTensor, as fully_shard")


def test_parameters_that_fully_shard_spreads_are_in_no_other_graph(device, alone, caplog):
    ours, theirs = sharded_twins(device)
    batches = make_batches(device, [8] * 3)
    with pytest.raises(ConfigError, match="is a DTensor, as fully_shard"):
        make_graphed_callables(ours, (batches[0][0],))
    with torch.no_grad():
        served = graphed(lambda ids: ours(ids), ladder=[2, 4])
        for ids, _ in batches:
            torch.testing.assert_close(served(ids), theirs(ids), rtol=1e-5, atol=1e-6)
    assert "is a DTensor, as fully_shard" in caplog.text
    train_eagerly(ours, adamw(ours), batches)


def test_data_parallel_that_counts_its_steps_is_refused_by_name(device, alone):
    models = [DistributedDataParallel(model, static_graph=True) for model in twins(make_model(device))]
    assert_refused_and_untouched(device, *models, "static_graph=True")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_data_parallel(device, alone, accumulate, caplog):
    ours, theirs = (DistributedDataParallel(model) for model in twins(make_model(device)))
    batches = make_batches(device, [8] * 6)
    mine, other = (torch.optim.AdamW(m.parameters(), lr=0.02, fused=True) for m in (ours, theirs))
    step = captured(ours, mine, accumulate=accumulate, options=options())
    found = [step(*batch).item() for batch in batches]
    expected = train_eagerly(theirs, other, batches, accumulate=accumulate)
    assert found == pytest.approx(expected, rel=1e-4 if device.type == "cuda" else 1e-6)
    if device.type == "cuda":
        assert step.report().eager_steps["capture-failed"] == 6 - accumulate
        assert "DistributedDataParallel reads times" in caplog.text
    else:
        assert step.report().eager_steps == {"first-call": accumulate}


def test_data_parallel_that_looks_for_unused_parameters_runs_eagerly(device, alone, caplog):
    ours, theirs = (
        DistributedDataParallel(model, find_unused_parameters=True) for model in twins(make_model(device))
    )
    batches = make_batches(device, [8, 4, 8, 8])
    step = captured(ours, adamw(ours), ladder=[4, 8], options=options())
    found = [step(*batch).item() for batch in batches]
    expected = train_eagerly(theirs, adamw(theirs), batches)
    assert found == pytest.approx(expected, rel=1e-4 if device.type == "cuda" else 1e-6)
    assert replays(step) == 0
    assert "find_unused_parameters=True" in caplog.text or device.type == "cuda"


def in_one_of_two_processes(rank, port):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    device = torch.device("cpu")
    ours, theirs = (DistributedDataParallel(model) for model in twins(make_model(device)))
    mine, other = (torch.optim.AdamW(m.parameters(), lr=0.02, fused=True) for m in (ours, theirs))
    batches = make_batches(device, [8, 5, 8, 3, 8, 8], seed=rank)
    if rank == 1:  # a first half without targets makes this rank try padding twice
        targets = batches[0][1].clone()
        targets[:, :4] = -100
        batches[0] = (batches[0][0], targets)
    step = captured(ours, mine, ladder=[8], options=options())
    found = [step(*batch).item() for batch in batches]
    assert found == pytest.approx(train_eagerly(theirs, other, batches), rel=1e-5)
    assert replays(step) == 5
    dist.destroy_process_group()


@pytest.mark.slow
def test_data_parallel_of_two_processes():
    """Each tries padding for itself, and gradients of trials are no one else's affair."""
    with __import__("socket").socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(in_one_of_two_processes, (port,), nprocs=2)


def prepared(device, *, precision="no", accumulate=1):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(
        mixed_precision=precision, gradient_accumulation_steps=accumulate, cpu=device.type == "cpu"
    )
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (number + 1))
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


@pytest.mark.parametrize(("precision", "accumulate"), [("bf16", 1), ("no", 2)])
def test_what_accelerate_prepared(device, precision, accumulate):
    batches = make_batches(device, [8] * 6)
    found, expected, rates, beside = [], [], [], []
    accelerator, ours, optimizer, scheduler = prepared(device, precision=precision, accumulate=accumulate)
    step = captured(ours, optimizer, accumulate=accumulate, clip_norm=1.0, options=options())
    for inputs, targets in batches:
        with accelerator.accumulate(ours):
            found.append(step(inputs, targets).item())
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
    assert step.report().eager_steps == {"first-call": accumulate}
    accelerator, theirs, optimizer, scheduler = prepared(device, precision=precision, accumulate=accumulate)
    for inputs, targets in batches:
        with accelerator.accumulate(theirs):
            loss = cross_entropy(theirs(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(theirs.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            expected.append(loss.item())
            beside.append(optimizer.param_groups[0]["lr"])
    assert found == pytest.approx(expected, rel=1e-3 if device.type == "cuda" else 1e-6)
    assert rates == beside
    if device.type == "cpu":
        assert same_parameters(ours, theirs)


def test_an_accumulation_that_accelerate_does_not_know_is_refused(device):
    _, model, optimizer, _ = prepared(device, accumulate=4)
    with pytest.raises(ConfigError, match="pass accumulate=4"):
        captured(model, optimizer)


class Critic(nn.Module):
    """Scores, and their gradients by what lies between the real and the fake."""

    def __init__(self, device):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)

    def forward(self, real, fake):
        weight = torch.rand(real.size(0), 1, device=real.device)
        between = (weight * real + (1 - weight) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.net(between).sum(), between, create_graph=True)
        return self.net(fake) - self.net(real), slope


def of_wasserstein(critic):
    return lambda outputs, _: outputs[0].mean() + 10 * (outputs[1].norm(2, 1) - 1).square().mean()


def of_real_ones(critic):
    def loss_fn(outputs, real):
        real.requires_grad_()  # in place: of the copy that a step is given
        score = critic.net(real)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        return nn.functional.softplus(-score).mean() + slope.square().sum(1).mean()

    return loss_fn


def of_parameters(critic):
    def loss_fn(outputs, _):
        loss, parameters = outputs[0].square().mean(), [*critic.net.parameters()]
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        curves = torch.autograd.grad(slopes, parameters, [s.detach() for s in slopes], create_graph=True)
        return loss + sum(c.square().sum() for c in curves if c is not None)

    return loss_fn


@pytest.mark.parametrize("make_loss", [of_wasserstein, of_real_ones, of_parameters])
def test_gradients_in_the_loss_are_differentiated_again(device, make_loss):
    """Also where the same batch comes again, in steps that run eagerly."""
    ours, theirs = twins(Critic(device))
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(4, 8, generator=generator).to(device) for _ in range(6)]
    batches = [((made[n], made[n + 1]), made[n]) for n in (0, 2, 4)] * 2
    batches.insert(3, ((made[0][:2], made[1][:2]), made[0][:2]))
    losses = []
    for model in (ours, theirs):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
        loss_fn = make_loss(model)
        step = captured(model, optimizer, loss_fn, ladder=None, options=options()) if model is ours else None
        torch.manual_seed(5)
        losses.append([])
        for inputs, targets in batches:
            if step is not None:
                losses[-1].append(step(inputs, targets).item())
                continue
            optimizer.zero_grad()
            loss = loss_fn(model(*inputs), targets.clone())
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        if step is not None:
            assert step.report().eager_steps == {"first-call": 1, "unseen-signature": 1}
    assert losses[0] == pytest.approx(losses[1], rel=1e-3 if device.type == "cuda" else 1e-5)
    assert not any(tensor.requires_grad for tensor in made)
