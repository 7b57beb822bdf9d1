"""Whole training steps from graphs, beside the loop that everybody writes: the same losses, bit for bit."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

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
from ostinato.graphs import AddressError, BatchError, CaptureError, ConfigError, GraphPool
from ostinato.graphs.training.ignored_targets import why_not_ignored
from ostinato.memory import GraphMemory, MemorySaver

STEPS = 13
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


def run_both(
    device, *, steps=STEPS, optimizer="adamw", dropout=0.0, varying=False, checkpointed=False, **settings
):
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


def assert_same(device, losses, eager, ours, theirs):
    """Bit for bit on a CPU. On a GPU a library may choose another kernel while a graph is recorded."""
    if device.type == "cpu":
        assert losses == eager
        assert same_parameters(ours, theirs)
        return
    assert losses == pytest.approx(eager, rel=1e-4)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


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
        "clip_norm": 0.3,
        "schedule": schedule,
        "accumulate": 4,
        "dropout": 0.2,
        "varying": True,
        "checkpointed": True,
    },
}


@pytest.mark.parametrize("obstacle", [name for name in OBSTACLES if name != "all"])
def test_losses_equal_eager_training(device, obstacle):
    step, losses, eager, ours, theirs = run_both(device, **OBSTACLES[obstacle])
    assert_same(device, losses, eager, ours, theirs)
    accumulate = OBSTACLES[obstacle].get("accumulate", 1)
    assert replays(step) == STEPS - accumulate, step.report()


@pytest.mark.parametrize(
    "obstacle", [name if name == "all" else pytest.param(name, marks=pytest.mark.slow) for name in OBSTACLES]
)
def test_losses_equal_eager_training_over_200_steps(device, obstacle):
    _, losses, eager, ours, theirs = run_both(device, steps=200, **OBSTACLES[obstacle])
    assert_same(device, losses, eager, ours, theirs)
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])


@pytest.mark.slow
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_losses_in_bf16_equal_eager_training_over_200_steps(device, obstacle):
    if device.type == "cuda":
        pytest.skip("on a GPU in tests/gpu: within the noise of two eager runs")
    _, losses, eager, ours, theirs = run_both(
        device, steps=200, autocast=torch.bfloat16, **OBSTACLES[obstacle]
    )
    assert_same(device, losses, eager, ours, theirs)


def small(device, *, optimizer=None, loss_fn=cross_entropy, **settings):
    """A step that has been captured, its model and optimizer."""
    model = make_model(device)
    optimizer = optimizer(model.parameters()) if optimizer else torch.optim.AdamW(model.parameters(), lr=0.02)
    step = captured(model, optimizer, loss_fn, **settings)
    for inputs, targets in make_batches(device, [8] * settings.get("accumulate", 1)):
        step(inputs, targets)
    return step, model, optimizer


def one_batch(device, length=8, seed=1, rows=2):
    return make_batches(device, [length], seed=seed, rows=rows)[0]


def reasons(step):
    return {reason: count for reason, count in step.report().eager_steps.items() if reason != "first-call"}


CAPTURABLE = {
    "NAdam": lambda p, **more: torch.optim.NAdam(p, lr=0.02, **more),
    "RAdam": lambda p, **more: torch.optim.RAdam(p, lr=0.02, **more),
    "RMSprop": lambda p, **more: torch.optim.RMSprop(p, lr=0.02, momentum=0.5, **more),
    "Adamax": lambda p, **more: torch.optim.Adamax(p, lr=0.02, **more),
    "AdamW, one by one": lambda p, **more: torch.optim.AdamW(p, lr=0.02, foreach=False),
    "Adam, foreach": lambda p, **more: torch.optim.Adam(p, lr=0.02, foreach=True),
}


QUICK = ("NAdam", "AdamW, one by one")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CAPTURABLE]
)
def test_any_capturable_optimizer(device, name):
    ours, theirs = twins(make_model(device))
    batches = make_batches(device, [8] * 12)
    optimizer = CAPTURABLE[name](ours.parameters())
    step = captured(ours, optimizer, schedule=schedule)
    losses = [float(step(*batch)) for batch in batches]
    eager = train_eagerly(theirs, CAPTURABLE[name](theirs.parameters()), batches, schedule=schedule)
    assert losses == pytest.approx(eager, rel=1e-4)
    assert replays(step) == 11
    broken = torch.full_like(ours.embedding.weight, math.nan)
    before = copy.deepcopy((ours.state_dict(), optimizer.state_dict()["state"]))
    handle = ours.embedding.weight.register_hook(lambda gradient: gradient + broken)
    step = captured(ours, optimizer)
    step(*batches[0])
    handle.remove()
    assert step.skipped == 1
    now = ours.state_dict(), optimizer.state_dict()["state"]
    assert all(torch.equal(now[0][key], before[0][key]) for key in before[0])
    assert all(torch.equal(now[1][i][key], value) for i in before[1] for key, value in before[1][i].items())


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "nadam"])
def test_gradients_that_are_not_finite_skip_the_update_on_the_device(device, kind, clip_norm):
    make = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
        "nadam": lambda p: torch.optim.NAdam(p, lr=0.02),
    }[kind]
    factor = torch.ones((), device=device)

    def loss_fn(logits, targets):
        return cross_entropy(logits, targets) * factor

    step, model, optimizer = small(device, optimizer=make, loss_fn=loss_fn, clip_norm=clip_norm)
    batch = one_batch(device)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    factor.fill_(math.inf)
    step(*batch)
    factor.fill_(math.nan)
    step(*batch)
    assert replays(step) == step.skipped == 2
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[0][key])
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1]["state"][number][key]) for key, value in state.items())
    factor.fill_(1)
    assert math.isfinite(step(*batch))
    assert step.skipped == 2
    assert not torch.equal(model.embedding.weight, before[0]["embedding.weight"])


def test_a_first_update_that_is_skipped_makes_no_state(device):
    factor = torch.full((), math.inf, device=device)
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = captured(model, optimizer, lambda logits, targets: cross_entropy(logits, targets) * factor)
    before = copy.deepcopy(model.state_dict())
    step(*one_batch(device))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert step.skipped == 1
    factor.fill_(1)
    for _ in range(3):
        assert math.isfinite(step(*one_batch(device)))
    assert replays(step) == 2


def test_a_scaler_follows_overflows_on_the_device(device):
    def scaler():
        return torch.amp.GradScaler(device.type, init_scale=2.0**127, growth_interval=3)

    def large(logits, targets):
        return cross_entropy(logits, targets) * 64

    ours, theirs = twins(make_model(device))
    batches = make_batches(device, [8] * 20)
    scalers = scaler(), scaler()
    step = captured(ours, optimizer_of("adamw", ours, device), large, scaler=scalers[0], clip_norm=1.0)
    losses = [float(step(*batch)) for batch in batches]
    eager = train_eagerly(
        theirs,
        optimizer_of("adamw", theirs, device, reference=True),
        batches,
        scaler=scalers[1],
        clip_norm=1.0,
        loss_fn=large,
    )
    assert_same(device, losses, eager, ours, theirs)
    assert scalers[0].state_dict() == scalers[1].state_dict()
    assert step.skipped > 0
    assert replays(step) > 10


def test_bf16_autocast(device):
    step, losses, eager, *_ = run_both(device, steps=10, autocast=torch.bfloat16)
    assert losses == pytest.approx(eager, rel=1e-2)
    assert replays(step) == 9
    with torch.autocast(device.type, dtype=torch.bfloat16), pytest.raises(ConfigError, match="autocast="):
        step(*one_batch(device))


@pytest.mark.parametrize("how", ["last", "flush"])
def test_a_last_accumulation_may_be_shorter(device, how):
    ours, theirs = twins(make_model(device))
    batches = make_batches(device, [8] * 10)
    step = captured(ours, optimizer_of("adamw", ours, device), accumulate=4)
    for number, batch in enumerate(batches):
        step(*batch, last=how == "last" and number == 9)
    if how == "flush":
        assert step.flush()
    assert not step.flush()
    train_eagerly(theirs, optimizer_of("adamw", theirs, device, reference=True), batches, accumulate=4)
    assert_same(device, [], [], ours, theirs)
    assert step.optimizer_steps == 3


def test_a_shorter_accumulation_has_the_digits_of_parameters_in_float64(device):
    ours, theirs = twins(make_model(device).double())
    batches, loss_fn = (
        make_batches(device, [8] * 3),
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()),
    )
    mine, other = (torch.optim.SGD(model.parameters(), lr=0.5) for model in (ours, theirs))
    step = captured(ours, mine, loss_fn, accumulate=4)
    for number, batch in enumerate(batches):
        step(*batch, last=number == 2)
    train_eagerly(theirs, other, batches, accumulate=4, loss_fn=loss_fn)
    for one, like in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, like, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stop", [pytest.param(0, marks=pytest.mark.slow), 1, 6])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(device, stop):
    """In the middle of an accumulation, too, and of a padded length."""
    settings = {"ladder": LADDER, "accumulate": 3, "clip_norm": 0.5, "schedule": schedule}
    batches = make_batches(device, lengths(12))

    def begin():
        model = make_model(device, dropout=0.2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        return model, optimizer, captured(model, optimizer, **settings)

    torch.manual_seed(5)
    model, optimizer, step = begin()
    losses = []
    for number, batch in enumerate(batches):
        if number == stop:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.state_dict()))
        losses.append(float(step(*batch)))
    model2, optimizer2, step2 = begin()
    for one, state in zip((model2, optimizer2, step2), saved, strict=True):
        one.load_state_dict(state)
    torch.rand(3, device=device)
    step2.load_state_dict(saved[2])
    assert [float(step2(*batch)) for batch in batches[stop:]] == losses[stop:]
    assert same_parameters(model, model2)


def test_states_are_loaded_in_place(device):
    step, model, optimizer = small(device)
    batches = make_batches(device, [8] * 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.state_dict()))
    assert isinstance(saved[1]["param_groups"][0]["lr"], float)
    assert saved[1]["param_groups"][0]["fused"] is None
    first = [float(step(*batch)) for batch in batches]
    addresses = [t.data_ptr() for state in optimizer.state.values() for t in state.values()]
    for one, state in zip((model, optimizer, step), saved, strict=True):
        one.load_state_dict(state)
    assert [t.data_ptr() for state in optimizer.state.values() for t in state.values()] == addresses
    replayed = replays(step)
    assert [float(step(*batch)) for batch in batches] == first
    assert replays(step) == replayed + 4


def test_a_state_from_before_the_first_update_begins_anew(device):
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    step = captured(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.state_dict()))
    batches = make_batches(device, [8] * 4)
    first = [float(step(*batch)) for batch in batches]
    for one, state in zip((model, optimizer, step), saved, strict=True):
        one.load_state_dict(state)
    assert [float(step(*batch)) for batch in batches] == first


def test_gradients_and_state_keep_their_addresses(device):
    for accumulate in (1, 2):
        step, model, optimizer = small(device, accumulate=accumulate, ladder=LADDER)

        def addresses(model=model, optimizer=optimizer):
            state = [t.data_ptr() for s in optimizer.state.values() for t in s.values()]
            return [(p.data_ptr(), p.grad.data_ptr()) for p in model.parameters()], state

        before = addresses()
        for inputs, targets in make_batches(device, [8, 3, 4, 8, 11, 3]):
            step(inputs, targets)
            assert addresses() == before
            optimizer.zero_grad()  # a habit that does no harm


def test_a_moved_parameter_is_named(device):
    step, model, _ = small(device)
    model.blocks[0].out.weight.data = model.blocks[0].out.weight.data.clone()
    with pytest.raises(AddressError, match=r"blocks\.0\.out\.weight"):
        step(*one_batch(device))
    step, model, optimizer = small(device)
    optimizer.state[model.blocks[0].out.weight]["exp_avg"] = torch.zeros_like(model.blocks[0].out.weight)
    with pytest.raises(AddressError, match="exp_avg"):
        step(*one_batch(device))


@pytest.mark.parametrize("kind", ["parameter", "buffer", "state"])
def test_what_moved_is_captured_anew_when_asked(device, kind):
    """And is trained from then on: graphs of the old memory would leave it as it is."""
    ours, theirs = twins(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 13)).to(device))
    mine, other = (optimizer_of("adamw", model, device, reference=True) for model in (ours, theirs))
    step = captured(ours, mine, F.cross_entropy, ladder=None)
    batch = torch.arange(24.0, device=device).view(4, 6).sin(), torch.arange(4, device=device)
    found = [step(*batch).item() for _ in range(2)]
    if kind == "parameter":
        ours[0].weight.data = ours[0].weight.data.clone()
    elif kind == "buffer":
        ours[1].running_mean = ours[1].running_mean.clone()
    else:
        state = mine.state[ours[0].weight]
        state["exp_avg"] = state["exp_avg"].clone()
    with pytest.raises(AddressError, match=r"step\.capture\(inputs, targets\)"):
        step(*batch)
    step.capture(*batch)
    found += [step(*batch).item() for _ in range(3)]
    assert found == train_eagerly(theirs, other, [batch] * 5, loss_fn=F.cross_entropy)
    assert same_parameters(ours, theirs)
    assert replays(step) == 3


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_type_does_not_matter(device, default):
    """Flags of ours are float32 all the same, which fused optimizers insist on."""
    ours, theirs = twins(make_model(device))
    settings = {"accumulate": 3, "clip_norm": 0.5}
    torch.set_default_dtype(default)
    try:
        step = captured(ours, optimizer_of("adamw", ours, device), ladder=LADDER, **settings)
        batches = make_batches(device, [8] * 6)
        found = [step(*batch).item() for batch in batches]
    finally:
        torch.set_default_dtype(torch.float32)
    other = optimizer_of("adamw", theirs, device, reference=True)
    assert found == train_eagerly(theirs, other, batches, **settings)
    assert same_parameters(ours, theirs)


def test_what_has_no_graph_runs_eagerly_with_a_reason(device):
    ours, theirs = twins(make_model(device))
    step = captured(ours, optimizer_of("adamw", ours, device), ladder=LADDER)
    batches = [one_batch(device), one_batch(device, 11), one_batch(device, rows=3), one_batch(device)]
    losses = [float(step(*batch)) for batch in batches]
    optimizer = optimizer_of("adamw", theirs, device, reference=True)
    assert_same(device, losses, train_eagerly(theirs, optimizer, batches), ours, theirs)
    assert reasons(step) == {"larger-than-max": 1, "unseen-signature": 1}
    step.capture(*one_batch(device, rows=3))
    step(*one_batch(device, rows=3))
    ours.eval()
    step(*one_batch(device))
    ours.train()
    step(*one_batch(device))
    assert reasons(step) == {"larger-than-max": 1, "unseen-signature": 1, "training-mode-changed": 1}
    assert replays(step) == 3


def test_a_learning_rate_may_be_set_in_the_groups_or_by_a_scheduler_of_torch(device):
    ours, theirs = twins(make_model(device))
    batches = make_batches(device, [8] * 9)
    optimizers = (
        torch.optim.SGD(ours.parameters(), lr=0.1),
        torch.optim.SGD(theirs.parameters(), lr=0.1, fused=True),
    )
    step = captured(ours, optimizers[0])
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]
    for number, batch in enumerate(batches):
        if number == 6:
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = 0.3
        step(*batch)
        train_eagerly(theirs, optimizers[1], [batch])
        for scheduler in schedulers:
            scheduler.step()
    gap = max((a - b).abs().max().item() for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert gap < 1e-6
    assert replays(step) == 8


def test_capturing_leaves_no_trace(device):
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, 8), nn.Dropout(0.3), Normalised(8), nn.Linear(8, VOCABULARY)
    )
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    step = captured(model, optimizer, accumulate=2)
    batches = make_batches(device, [8] * 3)
    for batch in batches:
        step(*batch)
    torch.manual_seed(1)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    state = step.state_dict()
    step.capture(*one_batch(device, rows=3))  # in the middle of an accumulation
    assert len(step.report().graphs) == 4
    assert all(torch.equal(value, before[0][key]) for key, value in model.state_dict().items())
    for number, saved in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1]["state"][number][key]) for key, value in saved.items())
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before[2], strict=True))
    now = step.state_dict()
    assert torch.equal(now["device_rng"], state["device_rng"])
    assert now["skipped"] == 0


class Normalised(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


LOSSES = {
    "counts padding": (lambda o, t: F.mse_loss(o, F.one_hot(t.clamp(min=0), VOCABULARY).float()), False),
    "divides by all": (lambda o, t: cross_entropy(o, t) * (t != -100).sum() / t.numel(), False),
    "of every position": (
        lambda o, t: F.cross_entropy(o.transpose(1, 2), t, reduction="none"),
        True,
    ),
    "cannot ignore": (lambda o, t: -o.log_softmax(-1).gather(-1, t[..., None]).mean(), False),
    "gathers every position": (lambda o, t: -o.log_softmax(-1).gather(-1, t[..., None])[..., 0], True),
}


def masked_loss(logits, targets, mask):
    losses = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    return (losses * mask).sum() / mask.sum()


@pytest.mark.parametrize("name", [*LOSSES, "asks for a mask"])
def test_padding_is_left_out_of_the_loss_or_nothing_is_padded(device, name):
    loss_fn, is_padded = LOSSES.get(name, (masked_loss, True))
    model = make_model(device)
    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, ladder=LADDER)
    for length in (8, 8, 4, 5, 3):
        inputs, targets = one_batch(device, length)
        mask = {"mask": torch.ones_like(inputs)} if name == "asks for a mask" else {}
        expected = loss_fn(model(inputs), targets, **mask).mean().item()
        assert float(step(inputs, targets)) == pytest.approx(expected, rel=1e-5)
    assert replays(step) == (4 if is_padded else 2)
    assert reasons(step) == ({} if is_padded else {"padding-disabled": 2})


@pytest.mark.parametrize("looks_up", [False, True])
def test_a_loss_function_may_hold_tensors_of_the_device(device, looks_up):
    """It cannot be tried on the host; looking up -100 on a GPU would be the process's end."""
    weights = torch.linspace(0.5, 1.5, VOCABULARY, device=device)

    def loss_fn(logits, targets):
        if looks_up:
            return (cross_entropy(logits, targets) * weights[targets]).mean()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=weights)

    model = make_model(device)
    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_fn, ladder=LADDER)
    for length in (8, 8, 5):
        inputs, targets = one_batch(device, length)
        expected = loss_fn(model(inputs), targets).item()
        assert step(inputs, targets).item() == pytest.approx(expected, rel=1e-5)
    assert reasons(step) == ({"padding-disabled": 1} if looks_up else {})


@pytest.mark.parametrize("kind", ["looks up", "custom", "custom on the host", "weighs"])
def test_indices_are_tried_on_the_host_before_another_device_sees_them(kind):
    """Tensors of torch's device `meta` stand for those of a GPU; a first failure for theirs beside the
    host's."""
    tried = []
    weights = torch.ones(3, device="meta" if kind in ("looks up", "custom") else "cpu")

    def loss_fn(logits, targets):
        tried.append(logits.dtype)
        if kind.startswith("custom"):
            return torch.ops.training_tests.looked_up(weights, targets.clamp(min=0)).mean()
        if len(tried) == 1:
            raise RuntimeError("two devices")
        return (
            weights[targets].mean()
            if kind == "looks up"
            else F.nll_loss(logits.float(), targets[:, 1], weights)
        )

    logits, targets = torch.randn(2, 3, dtype=torch.bfloat16), torch.tensor([[1, 1], [2, 2]])
    reason = why_not_ignored(loss_fn, logits, targets)
    assert tried == [torch.float32] + [torch.bfloat16] * (kind != "custom on the host")
    expected = {"looks up": "index -100 is out of bounds", "custom": "looked_up"}
    assert expected[kind] in reason if kind in expected else reason is None


@torch.library.custom_op("training_tests::looked_up", mutates_args=())
def looked_up(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return values[places]


@looked_up.register_fake
def _(values, places):
    raise AssertionError("this would have been launched")


def test_a_model_whose_rows_see_padding_is_served_at_its_lengths_only(device):
    class Averages(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

        def forward(self, ids):
            x = self.embedding(ids)
            return self.head(x + x.mean(1, keepdim=True))

    model = Averages().to(device)
    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.1), ladder=LADDER)
    for length in (8, 8, 5):
        step(*one_batch(device, length))
    assert reasons(step) == {"padding-disabled": 1}


class Judges(nn.Module):
    """Says the same of everything until it is trained, and learns from all positions."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids):
        return self.head(self.embedding(ids).mean(1))


@pytest.mark.parametrize("first", [8, 1])
def test_a_model_that_only_learns_otherwise_with_padding_is_served_at_its_lengths_only(device, first):
    model = Judges().to(device)
    labels = torch.tensor([2, 0], device=device)
    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, ladder=LADDER)
    for length in (first, 8, 5):
        expected = F.cross_entropy(model(one_batch(device, length)[0]), labels).item()
        assert step(one_batch(device, length)[0], labels).item() == pytest.approx(expected, rel=1e-6)
    assert reasons(step) == {"padding-disabled": 1}


class Turns(nn.Module):
    """By an angle that is nothing until it is trained, and is learnt from all positions."""

    def __init__(self):
        super().__init__()
        self.embedding, self.turn = nn.Embedding(VOCABULARY, VOCABULARY), nn.Parameter(torch.ones(1) + 0j)

    def forward(self, ids):
        x = self.embedding(ids)
        return x * self.turn.real + x.mean(1, keepdim=True) * self.turn.imag


def test_a_model_that_only_learns_other_imaginary_parts_with_padding_is_served_at_its_lengths_only(device):
    model = Turns().to(device)
    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.1), ladder=LADDER)
    for length in (8, 5):
        step(*one_batch(device, length))
    assert reasons(step) == {"padding-disabled": 1}


class WithReference:
    """The distance to a model that begins as the same one: nothing at first."""

    def __init__(self, model, is_masked):
        self.reference, self.is_masked = copy.deepcopy(model).requires_grad_(False), is_masked

    def __call__(self, outputs, targets):
        logits, ids = outputs
        ours, theirs = logits.log_softmax(-1), self.reference(ids)[0].log_softmax(-1)
        distance, real = (theirs.exp() * (theirs - ours)).sum(-1), targets != -100
        mean = (distance * real).sum() / real.sum() if self.is_masked else distance.mean()
        return cross_entropy(logits, targets) + 0.01 * mean


class SaysAll(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.model = make_model(device)

    def forward(self, ids):
        return self.model(ids), ids


def with_entropy(outputs, targets):
    """A small bonus, for padding as well: about the same everywhere."""
    logits, _ = outputs
    entropy = torch.distributions.Categorical(logits=logits, validate_args=False).entropy()
    return cross_entropy(logits, targets) - 1e-4 * entropy.mean()


@pytest.mark.parametrize("kind", ["masked", "not masked", "entropy"])
def test_terms_that_are_small_at_first_count_no_padding(device, kind):
    model = SaysAll(device)
    loss_fn = with_entropy if kind == "entropy" else WithReference(model, kind == "masked")
    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, ladder=LADDER)
    for length in (8, 8, 5):
        inputs, targets = one_batch(device, length)
        expected = loss_fn(model(inputs), targets).item()
        assert step(inputs, targets).item() == pytest.approx(expected, rel=1e-6)
    assert reasons(step) == ({} if kind == "masked" else {"padding-disabled": 1})


class Watching(nn.Module):
    """Counts what it sees, in a buffer, and its loss function how much: neither changes what is learnt."""

    def __init__(self, device, kind):
        super().__init__()
        self.model, self.kind = make_model(device), kind
        self.register_buffer("seen", torch.full((VOCABULARY,), 1000.0, device=device))
        self.positions = torch.full((), 1000.0, device=device)

    def forward(self, ids):
        if self.kind == "buffer":
            self.seen.index_add_(0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=torch.float32))
        return self.model(ids)

    def loss(self, logits, targets):
        if self.kind != "buffer":
            self.positions += (targets != -100).sum() if self.kind == "real" else targets.numel()
        return cross_entropy(logits, targets)


@pytest.mark.parametrize("kind", ["buffer", "all", "real"])
def test_what_is_counted_counts_no_padding(device, kind):
    ours, theirs = Watching(device, kind), Watching(device, kind)
    step = captured(ours, torch.optim.SGD(ours.parameters(), lr=0.1), ours.loss, ladder=LADDER)
    for length in (8, 8, 5):
        inputs, targets = one_batch(device, length)
        theirs.loss(theirs(inputs), targets)
        step(inputs, targets)
    assert torch.equal(ours.seen, theirs.seen)
    assert torch.equal(ours.positions, theirs.positions)
    assert reasons(step) == ({} if kind == "real" else {"padding-disabled": 1})


class WarmedUp:
    """A term for padding as well, whose weight is zero at first, and where that is kept."""

    def __init__(self, device, place):
        self.place, self.weight = place, 0.0
        self.tensor = torch.zeros(3, device=device)

    def __call__(self, logits, given):
        weight = {"input": given["weight"], "tensor": self.tensor[1], "number": self.weight}[self.place]
        return cross_entropy(logits, given["targets"]) + weight * logits.square().mean()

    def set(self, weight):
        self.tensor[1] = weight
        self.weight = weight if self.place == "number" else 0.0


@pytest.mark.parametrize("place", ["input", "tensor", "number"])
def test_terms_that_are_switched_on_later_count_no_padding(device, place):
    ours, theirs = twins(make_model(device))
    loss_fn, mine = WarmedUp(device, place), torch.optim.SGD(ours.parameters(), lr=0.1, fused=True)
    step = captured(ours, mine, loss_fn, ladder=LADDER)
    other, found, expected = torch.optim.SGD(theirs.parameters(), lr=0.1, fused=True), [], []
    for i, length in enumerate([8, 8, 5, 8]):
        loss_fn.set(float(i > 0))
        inputs, targets = one_batch(device, length)
        given = {"targets": targets, "weight": torch.tensor(float(i > 0), device=device)}
        if i == 1 and place == "number":
            step.capture(inputs, given)
        found.append(step(inputs, given).item())
        expected += train_eagerly(theirs, other, [(inputs, given)], loss_fn=loss_fn)
    assert found == pytest.approx(expected, rel=1e-6)
    assert reasons(step) == {"padding-disabled": 1}
    assert replays(step) == 2


def test_what_changes_before_the_first_update_counts_no_padding(device):
    ours, theirs = twins(make_model(device))
    loss_fn, mine = WarmedUp(device, "number"), torch.optim.SGD(ours.parameters(), lr=0.1, fused=True)
    step = captured(ours, mine, loss_fn, ladder=LADDER, accumulate=2)
    batches = [one_batch(device, length) for length in (8, 5, 5, 8)]
    given = [{"targets": targets, "weight": 0.0} for _, targets in batches]
    other, found, expected = torch.optim.SGD(theirs.parameters(), lr=0.1, fused=True), [], []
    for i, (inputs, _) in enumerate(batches):
        loss_fn.set(float(i > 0))
        found.append(step(inputs, given[i]).item())
        expected.append(loss_fn(theirs(inputs), given[i]))
        (expected[-1] / 2).backward()
        if i % 2:
            other.step()
            other.zero_grad()
    assert found == pytest.approx([loss.item() for loss in expected], rel=1e-6)
    assert reasons(step) == {"padding-disabled": 1}


def test_a_model_that_knows_the_length_is_served_at_its_lengths_only(device):
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make_model(device)

        def forward(self, ids):
            return self.model(ids) * (1 + 1e-3 * ids.size(1))

    model = Scales()
    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.1), ladder=LADDER)
    for length in (8, 8, 5):
        inputs, targets = one_batch(device, length)
        expected = cross_entropy(model(inputs), targets).item()
        assert step(inputs, targets).item() == pytest.approx(expected, rel=1e-6)
    assert reasons(step) == {"padding-disabled": 1}


class LooksAhead(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x.flip(1).cumsum(1).flip(1))


@pytest.mark.parametrize(("model_type", "is_padded"), [(LooksAhead, False), (nn.Identity, True)])
def test_padding_is_tried_with_positions_that_have_targets(device, model_type, is_padded):
    """Of prompts with their answers the first half may have none, and no loss."""
    model = make_model(device) if model_type is nn.Identity else model_type().to(device)
    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.1), ladder=LADDER)
    for length in (8, 8, 5):
        inputs, targets = one_batch(device, length)
        step(inputs, targets.index_fill(1, torch.arange(4, device=device), -100))
    assert reasons(step) == ({} if is_padded else {"padding-disabled": 1})


def test_labels_among_the_inputs_are_padded_as_targets_are(device):
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make_model(device)

        def forward(self, input_ids, labels):
            return cross_entropy(self.model(input_ids), labels)

    ours, theirs = twins(WithLoss())
    step = captured(ours, torch.optim.SGD(ours.parameters(), lr=0.1), lambda loss, _: loss, ladder=LADDER)
    other = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for length in (8, 8, 5, 3):
        inputs, targets = one_batch(device, length)
        loss = theirs(inputs, targets)
        other.zero_grad()
        loss.backward()
        other.step()
        found = step({"input_ids": inputs, "labels": targets}, None)
        assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    assert reasons(step) == {}
    assert replays(step) == 3


def test_a_parameter_without_gradient_is_left_alone(device):
    model = make_model(device)
    model.unused = nn.Linear(3, 3).to(device)
    before = copy.deepcopy(model.unused.state_dict())
    for accumulate in (1, 2):
        step = captured(model, torch.optim.AdamW(model.parameters(), weight_decay=0.5), accumulate=accumulate)
        for batch in make_batches(device, [8] * 6):
            step(*batch)
        assert replays(step) > 0
        assert all(torch.equal(value, before[key]) for key, value in model.unused.state_dict().items())


class Counting(torch.optim.Optimizer):
    """Keeps its count in Python, as many do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                p.sub_(p.grad / state["count"] * group["lr"])


def test_an_optimizer_that_counts_in_python_is_refused_where_all_must_be_captured(device):
    with pytest.raises(CaptureError, match="Counting keeps count in Python"):
        small(device, optimizer=Counting)
    ours, theirs = twins(make_model(device))
    batches = make_batches(device, [8] * 5)
    step = captured(ours, Counting(ours.parameters()), options=None)
    losses = [float(step(*batch)) for batch in batches]
    optimizer = Counting(theirs.parameters())
    optimizer.step = torch.no_grad()(optimizer.step)
    assert losses == pytest.approx(train_eagerly(theirs, optimizer, batches), rel=1e-6)
    assert reasons(step) == {}, "forward and backward are replayed, and it steps behind them"
    assert replays(step) == 4


def test_losses_are_tensors_of_their_own(device):
    step, *_ = small(device)
    losses = [step(*batch) for batch in make_batches(device, [8] * 3)]
    assert len({float(loss) for loss in losses}) == 3


def test_smaller_rungs_live_in_the_memory_of_the_largest(device):
    """Where activations are large, and where gradients are."""

    def pool_bytes(ladder, layers):
        pool = GraphPool(device)
        model = make_model(device, width=64, layers=layers)
        step = captured(model, torch.optim.AdamW(model.parameters()), ladder=ladder, pool=pool)
        step(*one_batch(device, ladder[-1]))
        assert len(step.report().graphs) == len(ladder)
        return pool.bytes

    assert pool_bytes([8, 16, 32, 64], layers=1) <= 1.1 * pool_bytes([64], layers=1)
    assert pool_bytes([2, 4], layers=3) <= 1.3 * pool_bytes([4], layers=3)


def test_activations_may_be_given_back_between_updates(device):
    """To somebody else on the device; what comes again has other contents."""
    ours, theirs = twins(make_model(device, dropout=0.2))
    batches = make_batches(device, lengths(12))
    saver = MemorySaver(device, hostile=True)
    settings = {"ladder": LADDER, "accumulate": 2, "clip_norm": 0.3}
    steps = [
        captured(model, torch.optim.AdamW(model.parameters(), lr=0.02), pool=pool, **settings)
        for model, pool in ((ours, GraphPool(device, memory=GraphMemory(saver))), (theirs, None))
    ]
    outcomes = []
    for step in steps:
        torch.manual_seed(4)
        losses = []
        for number, batch in enumerate(batches):
            losses.append(float(step(*batch)))
            if step is steps[0] and number % 2:
                saver.pause()
                saver.resume()
        outcomes.append(losses)
    assert outcomes[0] == outcomes[1]
    assert same_parameters(ours, theirs)
    assert replays(steps[0]) == replays(steps[1]) == 10


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_keep_what_they_draw(device, reentrant):
    def how(block, x):
        return checkpoint(block, x, use_reentrant=reentrant)

    ours, theirs = twins(make_model(device, dropout=0.5, layers=2, checkpoint=how))
    plain = copy.deepcopy(ours)
    plain.checkpoint = None
    batches = make_batches(device, [8] * 6)
    outcomes = []
    for model in (ours, plain):
        torch.manual_seed(2)
        step = captured(model, torch.optim.SGD(model.parameters(), lr=0.1))
        outcomes.append([float(step(*batch)) for batch in batches])
        assert replays(step) == 5
    assert outcomes[0] == pytest.approx(outcomes[1], rel=0 if device.type == "cpu" else 1e-5)
    torch.manual_seed(2)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, fused=True)
    assert outcomes[0] == pytest.approx(train_eagerly(theirs, optimizer, batches), rel=1e-5)


def test_inputs_may_be_trees(device):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model(device)

        def forward(self, input_ids, attention_mask):
            return self.inner(input_ids) * attention_mask[..., None]

    model = Masked()
    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.1), ladder=LADDER)
    for length in (8, 5, 3):
        inputs, targets = one_batch(device, length)
        given = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}
        expected = cross_entropy(model(**given), targets).item()
        assert float(step(given, targets)) == pytest.approx(expected, rel=1e-5)
    assert replays(step) == 2
    short = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)[:, :1]}
    expected = cross_entropy(model(**short), targets).item()
    assert float(step(short, targets)) == pytest.approx(expected, rel=1e-6), "the model takes that, so we do"
    assert reasons(step) == {"unseen-signature": 1}


def test_rows_without_a_sequence(device):
    """A perceptron: its features are its length, and there is one rung."""
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.05), F.mse_loss, ladder=[6])
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0)).to(device)
    losses = [float(step(x, x[:, :1] * 2)) for _ in range(40)]
    assert losses[-1] < 0.2 * losses[0]
    assert replays(step) == 39


def test_a_model_that_knows_one_length_only(device):
    """Images: their channels are the length, and nobody can leave one out."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5)).to(
        device
    )
    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, ladder=[3])
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(device)
    losses = [float(step(images, torch.arange(4, device=device))) for _ in range(6)]
    assert losses[-1] < losses[0]
    assert replays(step) == 5


def test_a_recurrent_model(device):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
            self.cells = nn.LSTM(8, 8, batch_first=True)

        def forward(self, ids):
            return self.head(self.cells(self.embedding(ids))[0])

    ours, theirs = twins(Recurrent().to(device))
    batches = make_batches(device, [8] * 5)
    step = captured(ours, optimizer_of("adamw", ours, device))
    losses = [float(step(*batch)) for batch in batches]
    eager = train_eagerly(theirs, optimizer_of("adamw", theirs, device, reference=True), batches)
    assert losses == pytest.approx(eager, rel=1e-5)
    assert replays(step) == 4


def test_settings_are_refused_by_name(device):
    model = make_model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for wrong in (
        *({"accumulate": 0}, {"accumulate": 2.5}, {"clip_norm": 0.0}, {"clip_norm": "1"}, {"ladder": []}),
        *({"autocast": True}, {"autocast": torch.int8}, {"scaler": True}, {"loss_fn": None}),
        *({"schedule": 0.1}, {"schedule": scheduler}),
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            captured(model, optimizer, **wrong)
    captured(model, optimizer, schedule=lambda i: np.float32(0.1))(*one_batch(device))
    for rates in (None, "0.1", ["0.1"]):
        with pytest.raises(ConfigError, match="which is not a learning rate"):
            captured(model, optimizer, schedule=lambda i, rates=rates: rates)(*one_batch(device))
    with pytest.raises(ConfigError, match="check that it is the optimizer of this model"):
        captured(model, torch.optim.SGD(make_model(device).parameters(), lr=0.1))(*one_batch(device))
    if device.type == "cpu":
        with pytest.raises(ConfigError, match="compile needs a CUDA device"):
            captured(model, optimizer, compile=True)
    with pytest.raises(ConfigError, match="LBFGS"):
        captured(model, torch.optim.LBFGS(model.parameters()))
    sparse = nn.Sequential(nn.Embedding(VOCABULARY, 8, sparse=True), nn.Linear(8, VOCABULARY)).to(device)
    with pytest.raises(ConfigError, match=r"0\.weight has a sparse gradient"):
        captured(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1))(*one_batch(device))
    with pytest.raises(BatchError, match="length"):
        captured(model, optimizer)(torch.zeros(3, device=device), torch.zeros(3, device=device))
    assert fast_options().strict
