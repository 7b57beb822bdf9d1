"""Numbers in the groups of an optimizer stay what the user put there; graphs read theirs on the device."""

import json

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from contract.training_loops import captured, make_batches, make_model, replays, train_eagerly, twins
from ostinato.graphs import CaptureOptions

OPTIMIZERS = {
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.02, fused=True),
    "capturable": lambda m: torch.optim.NAdam(m.parameters(), lr=0.02),
    "behind": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.02),
}
SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda i: 1 / (i + 1)),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 6),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.05, total_steps=20),
}
FLAGS = ("lr", "fused", "foreach", "capturable")


def options():
    return CaptureOptions(freeze_gc=False)


def test_what_is_collected_saved_and_logged_is_a_number(device):
    """`lrs.append(group["lr"])` must not give the last value many times."""
    for name, make in OPTIMIZERS.items():
        for make_scheduler in SCHEDULERS.values() if name == "fused" else [SCHEDULERS["LambdaLR"]]:
            ours, theirs = twins(make_model(device))
            mine, other = make(ours), make(theirs)
            rates, beside = make_scheduler(mine), make_scheduler(other)
            step, found, expected = captured(ours, mine, options=options()), [], []
            for batch in make_batches(device, [8] * 5):
                step(*batch)
                train_eagerly(theirs, other, [batch])
                for optimizer, scheduler, seen in ((mine, rates, found), (other, beside, expected)):
                    group = optimizer.param_groups[0]
                    seen.append((group["lr"], *scheduler.get_last_lr()))
                    seen.append({key: group.get(key) for key in FLAGS})
                    scheduler.step()
            assert found == expected
            assert json.dumps(found) == json.dumps(expected)
            assert mine.state_dict()["param_groups"] == other.state_dict()["param_groups"]
            assert rates.state_dict().keys() == beside.state_dict().keys()
            assert replays(step) == 4


def test_hooks_of_an_optimizer_see_numbers_too_and_may_set_them(device):
    ours, theirs = twins(make_model(device))
    seen = []
    optimizers = [OPTIMIZERS["fused"](model) for model in (ours, theirs)]
    for optimizer in optimizers:
        rates = []
        seen.append(rates)

        def halve(optimizer, *_):
            optimizer.param_groups[0]["lr"] /= 2

        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(lambda o, *_, rates=rates: rates.append(o.param_groups[0]["lr"]))
    step = captured(ours, optimizers[0])
    batches = make_batches(device, [8] * 4)
    found = [step(*batch).item() for batch in batches]
    expected = train_eagerly(theirs, optimizers[1], batches)
    assert found == pytest.approx(expected, rel=1e-4 if device.type == "cuda" else 1e-6)
    assert seen[0] == seen[1] == [0.01, 0.005, 0.0025, 0.00125]


def test_a_number_stays_when_an_optimizer_raises(device):
    class Fails(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            super().step()
            if self.fails:
                raise ValueError("on purpose")

    model = make_model(device)
    optimizer = Fails(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    step = captured(model, optimizer, options=options())
    batches = make_batches(device, [8] * 3)
    step(*batches[0])
    optimizer.fails = True
    with pytest.raises(ValueError, match="on purpose"):
        step(*batches[1])
    assert type(optimizer.param_groups[0]["lr"]) is float
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("device_of_rate", ["that of the model", "cpu"])
def test_a_tensor_that_was_given_stays_that_tensor(device, device_of_rate):
    """However it is written."""
    ours, theirs = twins(make_model(device))
    where = device if device_of_rate != "cpu" else torch.device("cpu")
    rates = [torch.tensor(0.02, device=where) for _ in range(2)]
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
        for model, rate in zip((ours, theirs), rates, strict=True)
    ]
    step, found, expected = captured(ours, optimizers[0]), [], []
    for batch in make_batches(device, [8] * 5):
        found.append(step(*batch).item())
        expected += train_eagerly(theirs, optimizers[1], [batch])
        for rate in rates:
            rate.data.mul_(0.5)
    assert found == pytest.approx(expected, rel=1e-4 if device.type == "cuda" else 1e-6)
    assert optimizers[0].param_groups[0]["lr"] is rates[0]
    assert step.report().eager_steps == {"first-call": 1}


def test_an_optimizer_of_somebodys_own_fits_in_with_a_tensor_as_its_rate(device):
    class Own(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad * self.param_groups[0]["lr"])

    ours, theirs = twins(make_model(device))
    rates = [torch.tensor(0.1, device=device) for _ in range(2)]
    mine, other = (Own(m.parameters(), {"lr": lr}) for m, lr in zip((ours, theirs), rates, strict=True))
    step, found, expected = captured(ours, mine), [], []
    for batch in make_batches(device, [8] * 5):
        found.append(step(*batch).item())
        expected += train_eagerly(theirs, other, [batch])
        for rate in rates:
            rate.mul_(0.5)
    assert found == pytest.approx(expected, rel=1e-4 if device.type == "cuda" else 1e-6)


def test_an_optimizer_serves_an_eager_loop_between_and_after(device):
    """Its flags are its own, so `step` of the optimizer itself is what it would be without us."""
    ours, theirs = twins(make_model(device).double())
    for name, make in OPTIMIZERS.items():
        mine, other = make(ours), make(theirs)
        step, found, expected = captured(ours, mine, options=options()), [], []
        for number, batch in enumerate(make_batches(device, [8] * 6)):
            expected += train_eagerly(theirs, other, [batch])
            if number in (3, 5):
                mine.zero_grad()
                found += train_eagerly(ours, mine, [batch])
            else:
                found.append(step(*batch).item())
        assert found == pytest.approx(expected, rel=1e-4 if device.type == "cuda" else 1e-6), name


def test_groups_with_rates_of_their_own(device):
    def make(model):
        groups = [{"params": [p], "lr": 0.01 * (n + 1)} for n, p in enumerate(model.parameters())]
        return torch.optim.AdamW(groups, lr=0.02, fused=True)

    ours, theirs = twins(make_model(device))
    mine, other = make(ours), make(theirs)
    rates, beside = (schedulers.ReduceLROnPlateau(o, patience=0, threshold=0.5) for o in (mine, other))
    step, found, expected = captured(ours, mine), [], []
    for batch in make_batches(device, [8] * 6):
        found.append(step(*batch).item())
        expected += train_eagerly(theirs, other, [batch])
        rates.step(expected[-1])
        beside.step(expected[-1])
    assert found == pytest.approx(expected, rel=1e-4 if device.type == "cuda" else 1e-6)
    assert [g["lr"] for g in mine.param_groups] == [g["lr"] for g in other.param_groups]
