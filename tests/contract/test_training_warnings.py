"""What a training step warns of: each cause once, however many steps, lengths and graphs it concerns."""

import pytest
import torch
from torch import nn

from contract.training_loops import captured, cross_entropy, make_batches, make_model
from ostinato.graphs import CaptureOptions


class Around(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.model, self.calls, self.weight, self.other = make_model(device), 0, 1.0, 1.0
        self.register_buffer("mean", torch.zeros((), device=device))

    def forward(self, ids):
        return self.model(ids) * self.weight * self.other


class Counts(Around):
    def forward(self, ids):
        self.calls += 1
        return super().forward(ids)


class Assigns(Around):
    def forward(self, ids):
        out = super().forward(ids)
        self.mean = self.mean * 0.9 + out.mean().detach() * 0.1
        return out + self.mean


class Alternates(Counts):
    def forward(self, ids):
        return super().forward(ids) * (1 + self.calls % 2)


class Reads(Around):
    def forward(self, ids):
        out = super().forward(ids)
        self.kept = out.mean().item()
        return out


class Writes(Around):
    def forward(self, ids):
        return super().forward(ids.clamp_(max=12))


def mean_of_all(logits, targets):
    return logits.square().mean()


def weights_move(number, model, optimizer):
    model.weight = 1 + number / 10


def modes_alternate(number, model, optimizer):
    model.train(number % 4 < 2)


def decay_moves(number, model, optimizer):
    optimizer.param_groups[0]["weight_decay"] = number / 100


CAUSES = {
    "assigns state": (Assigns, cross_entropy, None, "assigning a new tensor to mean"),
    "alternates": (Alternates, cross_entropy, None, "different work"),
    "reads": (Reads, cross_entropy, None, "Tensor.item"),
    "writes its input": (Writes, cross_entropy, None, "in place, but in a copy"),
    "counts padding": (Around, mean_of_all, None, "what padding holds"),
    "weights": (Around, cross_entropy, weights_move, "weight"),
    "modes": (Around, cross_entropy, modes_alternate, "eval"),
    "decay": (Around, cross_entropy, decay_moves, "weight_decay"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_one_cause_is_one_warning(device, name, caplog):
    kind, loss_fn, change, words = CAUSES[name]
    model = kind(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = CaptureOptions(freeze_gc=False)
    step = captured(model, optimizer, loss_fn, ladder=[4, 8], accumulate=2, options=options)
    for number, batch in enumerate(make_batches(device, [8, 3, 4, 6] * 3)):
        if change is not None:
            change(number, model, optimizer)
        step(*batch)
    assert len(caplog.messages) == 1, caplog.messages
    assert words in caplog.text
    if name in ("reads", "writes its input"):
        assert "test_training_warnings.py:" in caplog.messages[0]


def test_a_second_cause_is_named_too(device, caplog):
    model = Around(device)
    step = captured(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for number, batch in enumerate(make_batches(device, [8] * 10)):
        model.weight = 2.0 if number > 2 else 1.0
        model.other = 2.0 if number > 5 else 1.0
        step(*batch)
    assert len(caplog.messages) == 2
    assert "capture: weight." in caplog.messages[0]
    assert "capture: other." in caplog.messages[1]
