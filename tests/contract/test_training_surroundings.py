"""What people change around a captured training step: numbers in Python, frozen parts, second optimizers."""

import logging
import random
import re
from collections import UserDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from contract.training_loops import (
    VOCABULARY,
    captured,
    cross_entropy,
    make_batches,
    make_model,
    replays,
    same_parameters,
    train_eagerly,
    twins,
)
from ostinato.graphs import (
    BatchError,
    CaptureError,
    CaptureOptions,
    ConfigError,
    graphed_train_step,
    make_graphed_callables,
)

STEPS = 8
CHANGES_AT = 4


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, fused=True)


def losses_of_both(device, change, *, accumulate=1, loss_fn=cross_entropy):
    """Of the captured step and of the usual loop; `change(i, model)` comes before every micro-batch."""
    ours, theirs = twins(make_model(device))
    batches = make_batches(device, [8] * STEPS)
    step = captured(ours, adamw(ours), loss_fn, accumulate=accumulate)
    optimizer, found, expected = adamw(theirs), [], []
    for i, (inputs, targets) in enumerate(batches):
        change(i, ours)
        found.append(step(inputs, targets).item())
        change(i, theirs)
        loss = loss_fn(theirs(inputs), targets)
        (loss / accumulate).backward()
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        expected.append(loss.item())
    return step, found, expected


class ScaledDerivative(torch.autograd.Function):
    """A derivative of its own, which reads a number of its class."""

    factor = 1.0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ScaledDerivative.factor


def test_a_number_that_only_a_derivative_reads_is_noticed(device, monkeypatch):
    def change(i, model):
        monkeypatch.setattr(ScaledDerivative, "factor", 0.5 if i >= CHANGES_AT else 1.0)

    step, found, expected = losses_of_both(
        device, change, loss_fn=lambda output, targets: cross_entropy(ScaledDerivative.apply(output), targets)
    )
    assert found == expected
    assert step.report().eager_steps["attribute-changed"] == STEPS - CHANGES_AT


def test_a_number_that_changes_in_the_model_is_noticed(device, caplog):
    def change(i, model):
        model.blocks[0].norm.eps = 0.5 if i >= CHANGES_AT else 1e-5

    step, found, expected = losses_of_both(device, change)
    assert found == expected
    assert step.report().eager_steps["attribute-changed"] == STEPS - CHANGES_AT
    assert [line for line in caplog.messages if "differ from the capture: blocks.0.norm.eps." in line]


class Varied(nn.Module):
    """Reaches things that are neither parameters nor buffers."""

    def __init__(self, device):
        super().__init__()
        self.inside, self.act, self.device = make_model(device), nn.GELU(), device
        self.scale = torch.tensor(1.0, device=device)
        self.scales = [torch.tensor(1.0, device=device)]

    def forward(self, ids):
        return self.act(self.inside(ids)) * self.scale * self.scales[0]

    def three(self):
        return torch.tensor(3.0, device=self.device)


def moved(model):
    model.scale.data = model.three()


REPLACED = {
    "act": lambda model: setattr(model, "act", nn.ReLU()),
    "scale": lambda model: setattr(model, "scale", model.three()),
    "scales": lambda model: setattr(model, "scales", [model.three()]),
    r"scales\[0\]": lambda model: model.scales.__setitem__(0, model.three()),
    "capture: scale": moved,
    "a hook": lambda model: model.act.register_forward_hook(lambda module, args, output: output * 2),
    "a hook or": lambda model: setattr(model.act, "_forward_hooks", {1: lambda *given: given[2] * 2}),
    "method": lambda model: setattr(model.act, "forward", lambda x: x * 2),
    "a module": lambda model: setattr(model.act, "__class__", nn.Tanh),
}


QUICK = ("act", "scale", "a hook or")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in REPLACED]
)
def test_what_is_replaced_under_a_graph_is_noticed(device, name, caplog):
    model = Varied(device)
    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.0))
    batch = make_batches(device, [8])[0]
    first = step(*batch).item()
    assert step(*batch).item() == first
    REPLACED[name](model)
    now = step(*batch).item()
    assert now == pytest.approx(cross_entropy(model(batch[0]), batch[1]).item(), rel=1e-6)
    assert now != pytest.approx(first, rel=1e-3)
    assert step.report().eager_steps["attribute-changed"] == 1
    assert re.search(f"steps run eagerly while .*{name}", caplog.text)


class Growing(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.layers, self.factors, self.sizes = model, nn.ModuleList(), [1.0], {}
        self.results = []

    def forward(self, ids):
        x = self.model(ids) * getattr(self, "scale", 1.0)
        for layer in self.layers:
            x = layer(x)
        for factor in (*self.factors, *self.sizes.values()):
            x = x * factor
        return x


ADDED = {
    "layers.0": lambda model: model.layers.append(nn.Tanh()),
    "factors": lambda model: model.factors.append(0.5),
    "sizes": lambda model: model.sizes.update(b=0.5),
    "scale": lambda model: setattr(model, "scale", 0.5),
}


@pytest.mark.parametrize("name", [*ADDED, "nothing that is read"])
def test_what_is_added_under_a_graph_is_noticed(device, name, caplog):
    ours, theirs = (Growing(model) for model in twins(make_model(device)))
    step, optimizer = captured(ours, adamw(ours)), adamw(theirs)
    found, expected = [], []
    for i, batch in enumerate(make_batches(device, [8] * 6)):
        for model in (ours, theirs) if i == 3 else ():
            ADDED.get(name, lambda model: model.results.append(1.0))(model)
            model.comment = "nobody reads it"
        found.append(step(*batch).item())
        expected += train_eagerly(theirs, optimizer, [batch])
    assert found == expected
    assert step.report().eager_steps.get("attribute-changed", 0) == (3 if name in ADDED else 0)
    assert name not in ADDED or f"differ from the capture: {name}" in caplog.text


def test_what_is_captured_later_does_not_make_older_graphs_look_right(device):
    """A second capture, for other rows, while a number is another than at the first."""
    model = make_model(device)
    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.0))
    few, many = (make_batches(device, [8], rows=rows)[0] for rows in (2, 3))
    step(*few)
    model.blocks[0].norm.eps = 0.5
    step.capture(*many)
    for batch in (few, many):
        expected = cross_entropy(model(batch[0]), batch[1]).item()
        assert step(*batch).item() == pytest.approx(expected, rel=1e-6)
    assert replays(step) == 2, "all are captured anew"


def test_results_that_a_trainer_keeps_keep_no_step_from_its_graph(device):
    class Trainer:
        def __init__(self):
            self.model, self.last, self.weight = make_model(device), None, torch.ones((), device=device)
            self.step = captured(self.model, adamw(self.model), self.loss)

        def loss(self, logits, targets):
            return cross_entropy(logits, targets) * self.weight

        def train(self, batch):
            self.last = self.step(*batch)

    trainer = Trainer()
    for batch in make_batches(device, [8] * 4):
        trainer.train(batch)
    assert replays(trainer.step) == 3


def test_a_weight_of_a_term_of_the_loss_is_noticed(device):
    weight = {"squares": 0.0}

    def loss_fn(logits, targets):
        return cross_entropy(logits, targets) + weight["squares"] * logits.square().mean()

    def change(i, model):
        weight["squares"] = 0.5 if i == CHANGES_AT else 0.0

    step, found, expected = losses_of_both(device, change, loss_fn=loss_fn)
    assert found == expected
    assert replays(step) == STEPS - 2, "as it was again: from the graph again"


def test_a_count_of_updates_that_the_loss_reads_is_noticed(device, caplog):
    """The step's own: a term that is warmed up, say."""
    model = make_model(device)
    batch, of_steps = make_batches(device, [8])[0], []

    def warmed_up(logits, targets):
        return cross_entropy(logits, targets) * min(1.0, (1 + sum(s.optimizer_steps for s in of_steps)) / 4)

    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.0), warmed_up)
    of_steps.append(step)
    found = [step(*batch).item() for _ in range(4)]
    assert found == pytest.approx([found[0] * (i + 1) for i in range(4)], rel=1e-6)
    assert step.report().eager_steps == {"first-call": 1, "attribute-changed": 2}
    assert "optimizer_steps. A graph would continue" in caplog.text


def test_what_every_step_counts_is_counted_and_counts_no_trials(device, caplog):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.calls = make_model(device), 0

        def forward(self, ids):
            self.calls += 1
            return self.inside(ids)

    model = Counting()
    step = captured(model, adamw(model))
    for inputs, targets in make_batches(device, [8] * 3):
        step(inputs, targets)
    assert model.calls == 3
    assert replays(step) == 2, "it keeps no step from its graph"
    assert caplog.messages == []


class Keeping(nn.Module):
    """Leaves tensors where somebody may look for them."""

    def __init__(self, device):
        super().__init__()
        self.inside, self.spread, self.means = make_model(device), None, []

    def forward(self, ids):
        logits = self.inside(ids)
        self.spread = logits.detach().std()
        self.means.append(logits.detach().mean())
        return logits


def test_tensors_that_every_step_leaves_somewhere_are_left_by_replays(device, caplog):
    model = Keeping(device)
    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.0))
    spreads, wanted = [], []
    for inputs, targets in make_batches(device, [8] * 3):
        step(inputs, targets)
        spreads.append(model.spread)
        wanted.append(model.inside(inputs).detach())
    assert replays(step) == 2
    torch.testing.assert_close(spreads, [logits.std() for logits in wanted])
    torch.testing.assert_close(model.means, [logits.mean() for logits in wanted])
    assert caplog.messages == []


class Dropping(nn.Module):
    """Leaves its model out now and then, as layers of speech and text models do."""

    def __init__(self, device, draw):
        super().__init__()
        self.inside, self.draw = make_model(device), draw

    def forward(self, ids):
        return self.inside(ids) * self.draw()


DRAWS = {"Python": random.random, "NumPy": lambda: float(np.random.rand())}


@pytest.mark.parametrize("whose", DRAWS)
def test_random_numbers_of_python_are_in_no_graph(device, whose, caplog):
    ours, theirs = twins(Dropping(device, DRAWS[whose]))
    batches = make_batches(device, [8] * 4)

    def seed():
        random.seed(3)
        np.random.seed(3)

    seed()
    expected = train_eagerly(theirs, adamw(theirs), batches)
    seed()
    step = captured(ours, adamw(ours), options=CaptureOptions(freeze_gc=False))
    assert [step(*batch).item() for batch in batches] == expected
    assert step.report().eager_steps["capture-failed"] == 3
    assert any("draws from Python's or NumPy's random generator" in line for line in caplog.messages)
    strict = captured(theirs, adamw(theirs))
    with pytest.raises(CaptureError, match="draws from Python's or NumPy's random generator"):
        strict(*batches[0])


class Following(nn.Module):
    """Writes parameters itself: those of an encoder that follows another, and rows that are too long."""

    def __init__(self, device):
        super().__init__()
        self.inside, self.slow = make_model(device), make_model(device).requires_grad_(False)
        self.bounded = nn.Embedding(13, 13, max_norm=0.1, device=device)

    @torch.no_grad()
    def follow(self):
        for slow, fast in zip(self.slow.parameters(), self.inside.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)

    def forward(self, ids):
        self.follow()
        return self.inside(ids) + self.slow(ids) + self.bounded(ids)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_that_the_model_writes_itself_count_no_trials(device, accumulate):
    ours, theirs = twins(Following(device))
    batches = make_batches(device, [8] * 6)
    step = captured(ours, adamw(ours), accumulate=accumulate, ladder=[4, 8])
    found = [step(*batch).item() for batch in batches]
    assert found == train_eagerly(theirs, adamw(theirs), batches, accumulate=accumulate)
    assert same_parameters(ours, theirs)
    assert replays(step) == 6 - accumulate


def weight_of(model):
    return model.blocks[0].qkv.weight


HOOKS = {
    "of a parameter": lambda model: weight_of(model).register_hook(lambda gradient: gradient * 0.5),
    "when accumulated": lambda model: weight_of(model).register_post_accumulate_grad_hook(halve),
    "of a module": lambda model: model.blocks[0].out.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] * 0.5,)
    ),
    "before a module": lambda model: model.blocks[0].out.register_full_backward_pre_hook(
        lambda module, outputs: (outputs[0] * 0.5,)
    ),
}


def halve(parameter):
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_of_gradients_that_comes_later_is_called(device, kind, caplog):
    def change(i, model):
        if i == CHANGES_AT:
            HOOKS[kind](model)

    step, found, expected = losses_of_both(device, change)
    assert found == expected
    assert step.report().eager_steps["attribute-changed"] == STEPS - CHANGES_AT
    assert any("capture: a hook or method" in line for line in caplog.messages)


def stepping_at_once(optimizer_of):
    """Every parameter of the blocks has an optimizer, which steps as soon as there is a gradient."""

    def attach(model):
        for parameter in model.blocks.parameters():
            own = optimizer_of(parameter)

            def step(parameter, own=own):
                own.step()
                own.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)

    return attach


def losses_beside_others(device, attach):
    """With an optimizer of the embedding, and something else that trains the blocks."""
    ours, theirs = twins(make_model(device))
    batches = make_batches(device, [8] * 5)
    attach(theirs)
    optimizer = torch.optim.AdamW([theirs.embedding.weight], lr=0.02, fused=True)
    expected = train_eagerly(theirs, optimizer, batches)
    attach(ours)
    optimizer = torch.optim.AdamW([ours.embedding.weight], lr=0.02)
    step = captured(ours, optimizer, options=CaptureOptions(freeze_gc=False))
    assert [step(*batch).item() for batch in batches] == expected
    assert same_parameters(ours, theirs)
    return step


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_that_steps_in_hooks_of_gradients_is_in_no_graph(device, kind, caplog):
    step = losses_beside_others(device, stepping_at_once(lambda parameter: kind([parameter], lr=0.1)))
    assert step.report().eager_steps["capture-failed"] == 4
    assert f"another optimizer ({kind.__name__}) steps inside the training step" in caplog.text


def test_what_hooks_of_gradients_write_counts_no_trials(device):
    """By hand, with a momentum that the first step makes."""
    momenta, counts = {}, []

    def attach(model):
        count = torch.zeros((), device=device)
        counts.append(count)

        @torch.no_grad()
        def descend(parameter):
            momentum = momenta.setdefault(parameter, torch.zeros_like(parameter))
            momentum.mul_(0.5).add_(parameter.grad)
            parameter.sub_(momentum, alpha=0.05)
            parameter.grad = None

        for parameter in model.blocks.parameters():
            parameter.register_post_accumulate_grad_hook(descend)
        model.embedding.weight.register_hook(lambda gradient: (count.add_(1), gradient)[1])

    step = losses_beside_others(device, attach)
    assert replays(step) == 4
    assert [count.item() for count in counts] == [5, 5]


@pytest.mark.parametrize("kind", ["of a parameter", "when accumulated", "of a module"])
def test_what_hooks_of_gradients_leave_is_left_by_replays_and_by_no_trial(device, kind, caplog):
    model, seen, norms = make_model(device), [], {}

    def note(*given):
        seen.append(1)
        norms["latest"] = (given[0] if kind == "of a parameter" else weight_of(model)).detach().norm()

    if kind == "of a module":
        model.blocks[0].out.register_full_backward_hook(note)
    elif kind == "of a parameter":
        weight_of(model).register_hook(note)
    else:
        weight_of(model).register_post_accumulate_grad_hook(note)
    step = captured(model, adamw(model))
    for batch in make_batches(device, [8] * 3):
        step(*batch)
    assert len(seen) == 3
    assert replays(step) == 2
    if kind == "of a parameter":
        torch.testing.assert_close(norms["latest"], weight_of(model).grad.norm())
    assert caplog.messages == []


def test_numbers_that_a_trainer_counts_keep_no_step_from_its_graph(device):
    class Trainer:
        def __init__(self):
            self.model, self.steps, self.weight = make_model(device), 0, 1.0
            weight_of(self.model).register_hook(self.halved)

        def halved(self, gradient):
            return gradient * 0.5

        def loss(self, logits, targets):
            return cross_entropy(logits, targets) * self.weight

    trainer = Trainer()
    step = captured(trainer.model, adamw(trainer.model), trainer.loss)
    for batch in make_batches(device, [8] * 4):
        step(*batch)
        trainer.steps += 1
    assert replays(step) == 3
    trainer.weight = 0.5
    step(*batch)
    assert step.report().eager_steps["attribute-changed"] == 1


def test_shorter_batches_that_no_padding_suits_are_named_once(device, caplog):
    def loss_fn(logits, targets):
        return -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean()

    model = make_model(device)
    step = captured(model, adamw(model), loss_fn)
    for batch in make_batches(device, [8, 5, 8, 3]):
        step(*batch)
    assert step.report().eager_steps["padding-disabled"] == 2
    assert len([line for line in caplog.messages if "shorter batches run eagerly: the loss" in line]) == 1


def test_numbers_of_a_scaler_that_are_set_are_noticed(device, caplog):
    model, scaler = make_model(device), torch.amp.GradScaler(device.type, init_scale=4.0)
    step = captured(model, adamw(model), scaler=scaler)
    batches = make_batches(device, [8] * 4)
    for batch in batches[:2]:
        step(*batch)
    scaler.set_growth_interval(3)
    for batch in batches[2:]:
        step(*batch)
    assert scaler.get_scale() == 8.0
    assert step.report().eager_steps["attribute-changed"] == 2
    assert "differ from the capture: the scaler's numbers." in caplog.text


def test_an_optimizer_whose_state_is_thrown_away_begins_anew(device):
    ours, theirs = twins(make_model(device))
    first, second = (make_batches(device, [8] * 4, seed=seed) for seed in (0, 1))
    optimizer, plain = adamw(ours), adamw(theirs)
    step = captured(ours, optimizer)
    found = [step(*batch).item() for batch in first]
    optimizer.state.clear()
    found += [step(*batch).item() for batch in second]
    expected = train_eagerly(theirs, plain, first)
    plain.state.clear()
    assert found == expected + train_eagerly(theirs, plain, second)
    assert same_parameters(ours, theirs)
    assert replays(step) == 3, "of the graphs that were captured again"


def test_gradients_are_clipped_by_the_norm_in_the_order_of_the_model(device):
    def backwards(model):
        return torch.optim.AdamW([*model.parameters()][::-1], lr=0.02, fused=True)

    ours, theirs = twins(make_model(device, layers=3))
    batches = make_batches(device, [8] * 6)
    step = captured(ours, backwards(ours), clip_norm=0.1)
    found = [step(*batch).item() for batch in batches]
    assert found == train_eagerly(theirs, backwards(theirs), batches, clip_norm=0.1)
    assert same_parameters(ours, theirs)


def test_a_default_device_does_not_matter(device):
    ours, theirs = twins(make_model(device))
    batches = make_batches(device, [8, 8, 8])
    with torch.device("meta" if device.type == "cpu" else device):
        step = captured(ours, adamw(ours), clip_norm=1.0)
        found = [step(*batch).item() for batch in batches]
    assert found == train_eagerly(theirs, adamw(theirs), batches, clip_norm=1.0)
    assert same_parameters(ours, theirs)


def test_a_state_of_another_step_is_refused(device):
    model = make_model(device)
    step, other = (captured(model, adamw(model), accumulate=count) for count in (4, 2))
    for batch in make_batches(device, [8] * 3):
        step(*batch)
    with pytest.raises(
        ConfigError, match="has 3 micro-batches since an update, but this step updates after 2"
    ):
        other.load_state_dict(step.state_dict())
    with pytest.raises(
        ConfigError, match="not the state of a training step: it lacks device_rng, generators"
    ):
        other.load_state_dict(model.state_dict())
    assert other.micro_batches == 0


logged = 0


class Logging(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.inside, self.scale = make_model(device), 1.0

    def forward(self, ids):
        return self.scaled(self.inside(ids))

    def scaled(self, logits):
        return logits * self.scale * (1 + weights[0])

    def log(self):
        return logged


weights = [0.0]


def test_what_only_a_method_beside_reads_keeps_no_step_from_its_graph(device):
    global logged
    model = Logging(device)
    step = captured(model, adamw(model))
    for inputs, targets in make_batches(device, [8] * 3):
        step(inputs, targets)
        logged += 1
    assert replays(step) == 2
    weights[0] = 1.0
    step(inputs, targets)
    assert step.report().eager_steps["attribute-changed"] == 1, "forward reads that by way of a method"


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("frozen_first", [True, False])
def test_parts_are_frozen_and_released_on_the_way(device, accumulate, frozen_first, caplog):
    def change(i, model):
        model.blocks.requires_grad_((i >= CHANGES_AT) == frozen_first)

    _, found, expected = losses_of_both(device, change, accumulate=accumulate)
    assert found == expected
    assert [
        line for line in caplog.messages if "differ from the capture: the set of frozen parameters." in line
    ]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("at", [4, 5])
def test_what_was_released_is_captured_anew_when_asked(device, accumulate, at):
    ours, theirs = twins(make_model(device))
    step, other = captured(ours, adamw(ours), accumulate=accumulate), adamw(theirs)
    batches = make_batches(device, [8] * 8)
    for i, batch in enumerate(batches):
        for model in (ours, theirs):
            model.blocks[0].requires_grad_(i >= 2)
        if i == at:
            step.capture(*batch)
        step(*batch)
        if (i + 1) % accumulate == 0:
            train_eagerly(theirs, other, batches[i + 1 - accumulate : i + 1], accumulate=accumulate)
    assert same_parameters(ours, theirs)
    assert step.report().eager_steps == {"first-call": accumulate, "attribute-changed": at - 2}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_may_be_looked_at_after_every_step(device, accumulate):
    """The first update is followed by a capture, which makes some of its own."""
    ours, theirs = twins(make_model(device))
    step, other = captured(ours, adamw(ours), accumulate=accumulate), adamw(theirs)
    for i, (inputs, targets) in enumerate(make_batches(device, [8] * 6)):
        if i % accumulate == 0:
            other.zero_grad()
        (cross_entropy(theirs(inputs), targets) / accumulate).backward()
        step(inputs, targets)
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad)
        if (i + 1) % accumulate == 0:
            other.step()


def test_two_steps_may_train_the_same_parameters(device):
    """Each with an optimizer of its own; the gradients of the one are none of the other's."""
    ours, theirs = twins(make_model(device))
    others = adamw(theirs), torch.optim.SGD(theirs.parameters(), lr=0.1, fused=True)
    steps = (
        captured(ours, adamw(ours)),
        captured(ours, torch.optim.SGD(ours.parameters(), lr=0.1, fused=True), accumulate=2),
    )
    batches = make_batches(device, [8] * 9)
    for i in range(0, 9, 3):
        for number, batch in zip((0, 1, 1), batches[i : i + 3], strict=True):
            steps[number](*batch)
        train_eagerly(theirs, others[0], batches[i : i + 1])
        train_eagerly(theirs, others[1], batches[i + 1 : i + 3], accumulate=2)
    assert same_parameters(ours, theirs)
    assert [replays(step) for step in steps] == [2, 4]


def test_a_parameter_without_elements_does_no_harm(device):
    ours = make_model(device)
    ours.nothing = nn.Parameter(torch.empty(0, device=device))
    ours.register_forward_hook(lambda module, args, output: output + module.nothing.sum())
    theirs = make_model(device)
    step, batches = captured(ours, adamw(ours)), make_batches(device, [8] * 3)
    assert [step(*batch).item() for batch in batches] == train_eagerly(theirs, adamw(theirs), batches)


def test_parameters_of_another_optimizer_are_named_and_get_their_gradients(device, caplog):
    ours, theirs = make_model(device), make_model(device)
    norms = [[*model.blocks[0].norm.parameters()] for model in (ours, theirs)]
    rests = [
        [p for p in model.parameters() if not any(p is other for other in norm)]
        for model, norm in zip((ours, theirs), norms, strict=True)
    ]
    with caplog.at_level(logging.WARNING):
        step = captured(ours, torch.optim.AdamW(rests[0], lr=0.02))
    assert "lacks 2 parameters of the model (blocks.0.norm.weight, blocks.0.norm.bias" in caplog.text
    optimizer = torch.optim.AdamW(rests[1], lr=0.02)
    for parameter in (*norms[0], *norms[1]):
        parameter.grad = torch.full_like(parameter, 3.0)
    for inputs, targets in make_batches(device, [8] * 3):
        step(inputs, targets)
        optimizer.zero_grad()
        cross_entropy(theirs(inputs), targets).backward()
        optimizer.step()
    assert replays(step) == 2
    for mine, wanted in zip(*norms, strict=True):
        assert torch.allclose(mine.grad, wanted.grad, atol=1e-4), "trials add nothing"


def test_a_critic_that_only_the_loss_knows_gets_its_gradients_added(device):
    """Its optimizer's `zero_grad` frees them: a graph that adds to them would write into memory of others."""
    ours, theirs = make_model(device), make_model(device)
    critics = [nn.Linear(13, 1).to(device) for _ in range(2)]
    critics[1].load_state_dict(critics[0].state_dict())
    step = captured(ours, adamw(ours), lambda logits, targets: critics[0](logits).mean())
    optimizer = adamw(theirs)
    for inputs, targets in make_batches(device, [8] * 4):
        for critic in critics:
            critic.weight.grad, critic.bias.grad = torch.full_like(critic.weight, 3.0), None
        step(inputs, targets)
        optimizer.zero_grad()
        critics[1](theirs(inputs)).mean().backward()
        optimizer.step()
        for mine, wanted in zip(critics[0].parameters(), critics[1].parameters(), strict=True):
            assert torch.allclose(mine.grad, wanted.grad, atol=1e-4)
    assert replays(step) == 3


@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameters_with_an_optimizer_of_their_own_are_trained_as_without_graphs(device, accumulate):
    """Biases beside an optimizer of matrices, and centers that only the loss knows."""

    def trained(from_graphs):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
        centers = nn.Parameter(torch.randn(3, 3, device=device))
        matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
        biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]

        def loss_fn(z, y):
            return F.cross_entropy(z, y) + 0.1 * (z - centers[y]).pow(2).sum(-1).mean()

        own, other = torch.optim.SGD(matrices, lr=0.1), torch.optim.SGD([*biases, centers], lr=0.1)
        step = graphed_train_step(model, loss_fn, own, accumulate=accumulate)
        generator = torch.Generator().manual_seed(1)
        for number in range(8):
            x = torch.randn(6, 4, generator=generator).to(device)
            y = torch.randint(3, (6,), generator=generator).to(device)
            ends = number % accumulate == accumulate - 1
            if number % accumulate == 0:
                other.zero_grad()
            if from_graphs:
                step(x, y)
            else:
                (loss_fn(model(x), y) / accumulate).backward()
            if ends and not from_graphs:
                own.step()
                own.zero_grad()
            if ends:
                other.step()
        assert not from_graphs or replays(step) >= 6
        return [*model.parameters(), centers]

    for mine, wanted in zip(trained(True), trained(False), strict=True):
        assert torch.allclose(mine, wanted, atol=1e-5)


class Holds:
    """What is given may be an object that nobody can look into."""

    def __init__(self, targets=None):
        self.targets = targets


@pytest.mark.parametrize("is_new", [False, True])
def test_what_nobody_can_compare_is_in_no_graph(device, is_new, caplog):
    ours, theirs = twins(make_model(device))
    step = captured(
        ours,
        adamw(ours),
        lambda logits, given: cross_entropy(logits, given.targets),
        options=CaptureOptions(freeze_gc=False),
    )
    held, found = Holds(), []
    batches = make_batches(device, [8] * 4)
    for inputs, targets in batches:
        held = Holds() if is_new else held
        held.targets = targets
        found.append(step(inputs, held).item())
    assert found == train_eagerly(theirs, adamw(theirs), batches)
    assert "targets is a Holds, and changes to it cannot be detected" in caplog.text
    assert replays(step) == 0


def test_what_a_tokenizer_returns_is_a_dictionary(device):
    ours, theirs = twins(make_model(device))
    step, batches = captured(ours, adamw(ours)), make_batches(device, [8] * 4)
    found = [step(UserDict(ids=ids), targets).item() for ids, targets in batches]
    assert found == train_eagerly(theirs, adamw(theirs), batches)
    assert replays(step) == 3


def test_what_would_get_no_gradient_is_refused(device):
    model = nn.Linear(4, 13).to(device)
    step = captured(model, adamw(model))
    features, (_, targets) = torch.randn(2, 8, 4, device=device), make_batches(device, [8])[0]
    step(features, targets)
    with pytest.raises(BatchError, match=r"inputs requires a gradient, .* detach"):
        step(features.requires_grad_(), targets)


class Baseline:
    """A loss that keeps a mean in a tensor of its own, has a layer of its own, and draws by itself."""

    def __init__(self, device):
        self.mean, self.history = None, torch.zeros(3, device=device)
        self.norm, self.generator = nn.BatchNorm1d(13).to(device), torch.Generator(device).manual_seed(3)

    def __call__(self, logits, targets):
        value = logits.detach().square().mean()
        if self.mean is None:
            self.mean = torch.zeros_like(value)
        self.mean.mul_(0.9).add_(value, alpha=0.1)
        self.history[1].add_(value)
        noise = torch.randn(logits.shape, generator=self.generator, device=logits.device)
        weight = self.mean + self.history.sum()
        return (
            cross_entropy(self.norm(logits.transpose(1, 2)).transpose(1, 2) + 0.1 * noise, targets) * weight
        )


def test_what_is_given_stays_as_it_is_and_that_is_said(device, caplog):
    class Doubling(nn.Linear):
        def forward(self, x):
            return super().forward(x.mul_(2))

    model = Doubling(4, 3).to(device)
    x, targets = torch.ones(2, 4, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.0), F.cross_entropy, ladder=None)
    assert len({step(x, targets).item() for _ in range(3)}) == 1
    assert x.tolist() == [[1.0] * 4] * 2
    assert caplog.text.count("a step changes inputs in place, but in a copy") == 1


def test_what_a_loss_writes_in_tensors_of_its_own_counts_no_trials(device):
    ours, theirs = twins(make_model(device))
    batches = make_batches(device, [8] * 5)
    own, their_own = Baseline(device), Baseline(device)
    expected = train_eagerly(theirs, adamw(theirs), batches, loss_fn=their_own)
    step = captured(ours, adamw(ours), own)
    assert [step(*batch).item() for batch in batches] == expected
    assert replays(step) == 4
    assert torch.equal(own.norm.running_mean, their_own.norm.running_mean)
    assert torch.equal(own.history, their_own.history)


class Carrying(nn.Module):
    """Goes on from a tensor that the last call assigned."""

    def __init__(self, device, place):
        super().__init__()
        self.inside, self.place = make_model(device), place
        self.register_buffer("mean", torch.zeros(13, device=device))
        self.hidden = None

    def forward(self, ids):
        logits = self.inside(ids)
        if self.place == "buffer":
            self.mean = 0.9 * self.mean + 0.1 * logits.detach().mean((0, 1))
            return logits * self.mean
        before = 0.0 if self.hidden is None else self.hidden
        self.hidden = logits.detach().mean(1, keepdim=True)
        return logits * before


@pytest.mark.parametrize("place", ["buffer", "attribute"])
def test_state_that_is_kept_by_assigning_is_in_no_graph(device, place, caplog):
    ours, theirs = twins(Carrying(device, place))
    batches = make_batches(device, [8] * 4)
    expected = train_eagerly(theirs, adamw(theirs), batches)
    step = captured(ours, adamw(ours), options=CaptureOptions(freeze_gc=False))
    assert [step(*batch).item() for batch in batches] == expected
    assert step.report().eager_steps["capture-failed"] == 3
    name = "mean" if place == "buffer" else "hidden"
    assert any(f"keeps state by assigning a new tensor to {name}" in line for line in caplog.messages)


class Differentiating(nn.Module):
    """Needs gradients of its own results: a penalty of them, hooks."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 13)

    def forward(self, x):
        x = x.detach().requires_grad_()
        hidden = self.first(x)
        hidden.register_hook(lambda gradient: gradient * 0.5)
        logits = self.second(hidden.tanh())
        (slope,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return logits * (1 + slope.square().mean())


class InTurns(nn.Module):
    """Uses one of two layers after the other."""

    def __init__(self, device):
        super().__init__()
        self.inside, self.is_odd = make_model(device), False
        self.heads = nn.ModuleList([nn.Linear(VOCABULARY, VOCABULARY, device=device) for _ in range(2)])

    def forward(self, ids):
        self.is_odd = not self.is_odd
        return self.heads[self.is_odd](self.inside(ids))


class Warming(InTurns):
    """Counts, and computes with that."""

    def forward(self, ids):
        self.is_odd += 1
        return self.inside(ids) * min(1.0, self.is_odd / 8)


class Ring(InTurns):
    """Keeps the last words in a ring, whose end it knows in Python; after two steps it is where it was."""

    def __init__(self, device):
        super().__init__(device)
        self.end = 0
        self.register_buffer("ring", torch.zeros(2, VOCABULARY, device=device))

    def forward(self, ids):
        logits = self.inside(ids)
        self.ring[self.end] = logits.detach().mean((0, 1))
        self.end = 1 - self.end
        return logits + self.ring.sum(0)


class Normal(InTurns):
    """Gives a parameter other memory in every step."""

    def forward(self, ids):
        self.heads[0].weight.data = nn.functional.normalize(self.heads[0].weight.data)
        return self.heads[0](self.inside(ids))


class Swaps(InTurns):
    """Has two buffers change places."""

    def __init__(self, device):
        super().__init__(device)
        self.register_buffer("one", torch.ones((), device=device))
        self.register_buffer("other", torch.zeros((), device=device))

    def forward(self, ids):
        self.one, self.other = self.other, self.one
        return self.inside(ids) * (1 + self.one)


@pytest.mark.parametrize("kind", [InTurns, Warming, Ring, Normal, Swaps])
def test_what_python_carries_from_step_to_step_is_in_no_graph(device, kind, caplog):
    torch.manual_seed(0)
    ours, theirs = twins(kind(device))
    for model in (ours, theirs):
        model.requires_grad_(False)
        model.inside.requires_grad_(True)
    step = captured(ours, adamw(ours), options=CaptureOptions(freeze_gc=False))
    batches = make_batches(device, [8] * 5)
    assert [step(*batch).item() for batch in batches] == train_eagerly(theirs, adamw(theirs), batches)
    assert same_parameters(ours, theirs)
    assert step.report().eager_steps["capture-failed"] == 4
    assert re.search("which is decided in Python|keeps state by assigning", caplog.text)


def test_a_model_that_differentiates_by_itself(device):
    ours, theirs = twins(Differentiating().to(device))
    batches = [(torch.randn(2, 8, 4, device=device), y) for _, y in make_batches(device, [8] * 4)]
    expected = train_eagerly(theirs, adamw(theirs), batches)
    step = captured(ours, adamw(ours))
    assert [step(*batch).item() for batch in batches] == expected
    assert replays(step) == 3
    assert same_parameters(ours, theirs)


def test_a_capture_that_is_interrupted_leaves_the_gradients_of_others(device):
    model, critic = make_model(device), nn.Linear(13, 1).to(device)
    step = captured(model, adamw(model), lambda logits, targets: critic(logits).mean())
    batch = make_batches(device, [8])[0]

    def interrupt(gradient):
        raise KeyboardInterrupt

    step(*batch)
    critic.weight.grad = torch.full_like(critic.weight, 3.0)
    handle = model.blocks[0].out.bias.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        step.capture(*batch)
    handle.remove()
    assert torch.equal(critic.weight.grad, torch.full_like(critic.weight, 3.0))


# -- parts of a model ---------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), 1.0

    def forward(self, x):
        return self.linear(x) * self.scale


def test_a_part_notices_a_number_and_a_parameter_that_is_released(device):
    part = Scaled().to(device)
    part.linear.bias.requires_grad_(False)
    x = torch.randn(3, 4, device=device)
    make_graphed_callables(part, (x,))
    plain = part(x)
    part.scale = 5.0
    assert torch.allclose(part(x), plain * 5)
    part.scale = 1.0
    part.linear.bias.requires_grad_(True)
    part(x).sum().backward()
    assert torch.allclose(part.linear.bias.grad, torch.full((4,), 3.0, device=device))
    assert part.forward.eager_steps == {"attribute-changed": 2}


def test_a_function_that_trains_what_it_is_not_given_is_refused(device):
    weight = torch.randn(4, 4, device=device, requires_grad=True)
    with pytest.raises(CaptureError, match=r"a tensor \[4, 4\] that requires a gradient .* would get none"):
        make_graphed_callables(lambda x: x @ weight, (torch.randn(3, 4, device=device),))


def test_a_part_that_draws_in_python_is_refused_and_draws_nothing(device):
    before = random.getstate()
    with pytest.raises(CaptureError, match="draws from Python's or NumPy's random generator"):
        make_graphed_callables(lambda x: x * random.random(), (torch.randn(3, 4, device=device),))
    assert random.getstate() == before


def test_a_part_that_writes_its_parameters_is_as_it_was(device):
    part = nn.Embedding(7, 5, max_norm=0.1, device=device)
    before = part.weight.detach().clone()
    make_graphed_callables(part, (torch.zeros(4, dtype=torch.int64, device=device),), ladder=[2, 4])
    assert torch.equal(part.weight, before)


def test_a_part_that_writes_tensors_of_its_own_is_as_it_was(device):
    count = torch.zeros((), device=device)
    part = make_graphed_callables(lambda x: x * count.add_(1.0), (torch.randn(4, 4, device=device),))
    assert count == 0, "trials and captures count for nothing"
    assert torch.equal(part(torch.ones(4, 4, device=device)), torch.ones(4, 4, device=device))
    assert count == 1


def test_a_scripted_model_is_trained_from_graphs_and_watched(device):
    torch.manual_seed(0)
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(device))
    twin = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
    twin.load_state_dict(model.state_dict())
    loss, other = nn.CrossEntropyLoss(), torch.optim.SGD(twin.parameters(), lr=0.1)
    step = graphed_train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(6, 4, device=device), torch.randint(3, (6,), device=device)
    for _ in range(4):
        other.zero_grad()
        wanted = loss(twin(x), y)
        wanted.backward()
        other.step()
        assert torch.allclose(step(x, y), wanted.detach(), atol=1e-5)
    assert not step.report().failures
    for each in (model, twin):
        next(each.parameters()).data = torch.zeros(8, 4, device=device)
    assert torch.allclose(step(x, y), loss(twin(x), y).detach(), atol=1e-5), "not from a graph of the old"
