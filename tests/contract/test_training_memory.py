"""What memory a captured training step takes beside eager training, and that it writes no other."""

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contract.training_loops import captured, make_batches, make_model, train_eagerly, twins
from ostinato.graphs.capturing import recorder
from ostinato.graphs.training.padding import PaddingTrial


class LiveBytes(TorchDispatchMode):
    """The most that tensors made meanwhile take at a time."""

    def __init__(self):
        super().__init__()
        self._live, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return result


@pytest.mark.parametrize(
    "size",
    [
        pytest.param({"rows": 8, "length": 64, "width": 64}, marks=pytest.mark.slow),
        {"rows": 2, "length": 8, "width": 128},
    ],
)
def test_the_pool_is_about_what_an_eager_step_takes(device, size):
    """Where activations count, and where gradients do."""
    if device.type != "cpu":
        pytest.skip("on a GPU in tests/gpu: what its allocator takes")
    ours, theirs = twins(make_model(device, layers=2, width=size["width"]))
    batch = make_batches(device, [size["length"]], rows=size["rows"])[0]
    optimizer = torch.optim.AdamW(theirs.parameters(), fused=True)
    train_eagerly(theirs, optimizer, [batch], clip_norm=1.0)
    with LiveBytes() as eager:
        train_eagerly(theirs, optimizer, [batch], clip_norm=1.0)
    step = captured(ours, torch.optim.AdamW(ours.parameters()), ladder=None, clip_norm=1.0)
    step(*batch)
    assert 0.5 * eager.most < step.report().pool_bytes < 1.25 * eager.most


def test_trials_of_padding_take_little_more_than_an_eager_step(device, monkeypatch):
    """Of a model whose answers are most of what a step holds, as a language model's are."""
    words = 65_536  # many chunks of a comparison
    model = torch.nn.Sequential(torch.nn.Embedding(words, 8), torch.nn.Linear(8, words)).to(device)

    def loss_fn(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    ids = torch.randint(words, (2, 17), generator=torch.Generator().manual_seed(0)).to(device)
    batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    with LiveBytes() as eager:
        loss_fn(model(batch[0]), batch[1]).backward()
    model.zero_grad()
    trials, real = LiveBytes(), PaddingTrial.kind_of

    def watched(*args):
        with trials:
            return real(*args)

    monkeypatch.setattr(PaddingTrial, "kind_of", watched)
    step = captured(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, ladder=[8, 16])
    step(*batch)
    assert eager.most < trials.most < 1.5 * eager.most


@pytest.mark.parametrize("name", ["mse_loss", pytest.param("smooth_l1_loss", marks=pytest.mark.slow)])
def test_a_mean_over_a_loss_is_written_where_it_belongs(device, name, capfd):
    """Their forms that write into a given tensor make it large for a moment, and say so every time."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = captured(model, optimizer, getattr(torch.nn.functional, name), ladder=None)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(device)
    losses = [float(step(x, x[:, :3])) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert "resized" not in capfd.readouterr().err


def test_no_trial_run_takes_memory_beside_that_of_graphs(device, monkeypatch):
    """Graphs of several lengths share a pool; what their warm-ups take comes and goes before it is there."""
    events = []

    def note(owner, name):
        real = getattr(owner, name)

        def noted(*args, **kwargs):
            events.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    note(recorder, "record")
    note(recorder.Trials, "run")
    model = make_model(device)
    step = captured(model, torch.optim.AdamW(model.parameters()), ladder=[8, 16, 32])
    for batch in make_batches(device, [32, 16, 8, 32], rows=2):
        step(*batch)
    first = events.index("record")
    assert events[:first].count("run") >= 3, "a warm-up of each"
    assert events[first:] == ["record"] * 3
    assert sum(graph.replays for graph in step.report().graphs) == 3
