"""A whole training step, forward, backward and optimizer, as one tape."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tape_recording import record
from torch import nn

from ostinato.graphs.errors import CaptureError


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 4)
    )


OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, fused=True),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True, capturable=torch.cuda.is_available()),
}


def make_step(net, optimizer, x, target, *, clip):
    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x), target)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5, foreach=clip == "foreach")
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize("clip", [None, "foreach", "single"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_equals_eager(kind, clip):
    eager_net = make_net()
    taped_net = copy.deepcopy(eager_net)
    x, target = torch.randn(8, 6), torch.randint(0, 4, (8,))
    rates = torch.tensor(0.05), torch.tensor(0.05)
    optimizers = [
        OPTIMIZERS[kind](n.parameters(), r) for n, r in zip((eager_net, taped_net), rates, strict=True)
    ]
    eager = make_step(eager_net, optimizers[0], x, target, clip=clip)
    taped = make_step(taped_net, optimizers[1], x, target, clip=clip)
    for step in (eager, taped):  # optimizer state must exist before a capture, as on CUDA
        torch.manual_seed(1)
        step()
    recorded = record(taped, grad=True)
    for number in range(6):
        x.copy_(torch.randn(8, 6, generator=torch.Generator().manual_seed(number)))
        for rate in rates:
            rate.fill_(0.05 / (number + 1))
        torch.manual_seed(100 + number)
        expected = eager()
        torch.manual_seed(100 + number)
        assert torch.equal(recorded.replay(), expected), number
    for (name, one), other in zip(
        eager_net.state_dict().items(), taped_net.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name
    for one, other in zip(eager_net.parameters(), taped_net.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), "grad fields must see replayed gradients"


def test_gradients_accumulate_in_place():
    net, x = nn.Linear(3, 1), torch.ones(2, 3)
    net(x).sum().backward()
    first = net.weight.grad.clone()

    def step():
        net(x).sum().backward()

    recorded = record(step, grad=True)
    assert torch.equal(net.weight.grad, first), "recording accumulated"
    recorded.replay()
    recorded.replay()
    assert torch.equal(net.weight.grad, 3 * first)


def test_the_ordinary_optimizer_is_refused():
    net, x = nn.Linear(3, 1), torch.ones(2, 3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    step = make_step(net, optimizer, x, torch.zeros(2, dtype=torch.long), clip=None)
    step()
    if torch.cuda.is_available():
        pytest.skip("with a GPU, torch itself refuses first")
    with pytest.raises(CaptureError, match="counts its steps on the host"):
        record(step, grad=True)


def test_batch_norm_of_a_transposed_input():
    """Torch's out-variant is wrong there."""
    norm, x = nn.BatchNorm1d(4), torch.randn(2, 6, 4)
    twin = copy.deepcopy(norm)
    recorded = record(lambda: norm(x.transpose(1, 2)), grad=True)
    assert torch.equal(recorded.replay(), twin(x.transpose(1, 2)))
    assert torch.equal(norm.running_mean, twin.running_mean)
