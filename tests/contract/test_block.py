"""`capture_block`: code between two lines as a graph, with the runtime's promises."""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from contract.steps import WIDTH, randn, same
from ostinato.graphs import AddressError, CaptureError, GraphPool, capture_block, capture_gate, graphed


@pytest.fixture
def pool(device):
    return GraphPool(device)


def ran_before(function):
    """Blocks cannot be warmed up: their code has run before."""
    for _ in range(2):
        result = function()
    return result


def test_a_replay_works_on_what_its_tensors_hold_now(device, pool):
    layer, x = nn.Linear(WIDTH, WIDTH).to(device), torch.zeros(4, WIDTH, device=device)
    with torch.no_grad():
        ran_before(lambda: layer(x).relu())
        with capture_block(pool=pool) as block:
            y = layer(x).relu()
            total = y.sum(0)
    for seed in range(5):
        x.copy_(randn(4, WIDTH, device=device, seed=seed))
        with torch.no_grad():
            layer.bias.add_(1)
            wanted = layer(x).relu()
        block.replay()
        torch.testing.assert_close(y, wanted)
        torch.testing.assert_close(total, wanted.sum(0))
    assert block.replays == 5
    assert block.seconds > 0


def test_recording_changes_nothing_from_before(device, pool):
    x, count, out = (torch.ones(3, device=device) for _ in range(3))
    torch.manual_seed(3)
    wanted = torch.rand(3, device=device)
    torch.manual_seed(3)
    with capture_block(pool=pool) as block:
        count.add_(x)
        out.copy_(count * 2 + torch.rand(3, device=device) * 0)
    assert same(count, torch.ones_like(count))
    assert same(out, torch.ones_like(out))
    assert same(torch.rand(3, device=device), wanted)
    block.replay()
    block.replay()
    assert count.tolist() == [3, 3, 3]
    assert out.tolist() == [6, 6, 6]


def test_every_replay_draws_new_numbers(device, pool):
    x = torch.ones(64, device=device)
    with capture_block(pool=pool) as block:
        y = F.dropout(x, 0.5)
    block.replay()
    first = y.clone()
    block.replay()
    assert not same(first, y)
    own = torch.Generator(device).manual_seed(1)
    with capture_block(pool=pool, generators=(own,)) as block:
        z = torch.rand(64, device=device, generator=own)
    block.replay()
    first = z.clone()
    block.replay()
    assert not same(first, z)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_training_step_trains_as_it_does_without_a_graph(device, pool, name):
    if name == "Adam" and device.type == "cpu":
        pytest.skip("on a CPU torch's Adam counts on the host")

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)
        options = {"momentum": 0.9} if name == "SGD" else {"capturable": True}
        return model, getattr(torch.optim, name)(model.parameters(), lr=0.05, **options)

    x, labels = torch.zeros(6, WIDTH, device=device), torch.zeros(6, dtype=torch.long, device=device)
    (model, optimizer), (eager, its_own) = make(), make()

    def step(model, optimizer):
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream() if device.type == "cuda" else None
    for number in range(8):
        x.copy_(randn(6, WIDTH, device=device, seed=number))
        labels.copy_(torch.arange(6) % 3)
        wanted = step(eager, its_own)
        if number < 3:
            with torch.cuda.stream(side):
                if side is not None:
                    side.wait_stream(torch.cuda.default_stream())
                step(model, optimizer)
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
            optimizer.zero_grad(set_to_none=True)
            continue
        if number == 3:
            with capture_block(pool=pool) as block:
                loss = step(model, optimizer)
        block.replay()
        torch.testing.assert_close(loss, wanted)
    for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, its)


def test_an_optimizer_that_counts_on_the_host_is_told_of_capturable(device, pool):
    layer = nn.Linear(2, 2).to(device)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 2, device=device)).sum().backward()
    optimizer.step()
    with pytest.raises(CaptureError, match=r"Adam.*capturable"):
        with capture_block(pool=pool):
            optimizer.step()


def test_blocks_and_wrappers_share_a_pool(device, pool):
    x = torch.zeros(4, WIDTH, device=device)
    f = graphed(lambda a: (a * 3).cumsum(1), ladder=[2, 4], pool=pool)
    f(randn(3, WIDTH, device=device))
    with capture_block(pool=pool) as first:
        h = x * 2
    with capture_block(pool=pool) as second:
        y = h + 1
    for seed in range(3):
        x.copy_(randn(4, WIDTH, device=device, seed=seed))
        first.replay()
        second.replay()
        torch.testing.assert_close(y, x * 2 + 1)
        rows = randn(3, WIDTH, device=device, seed=seed)
        torch.testing.assert_close(f(rows), (rows * 3).cumsum(1))
    assert f.report().replays == 4


def test_a_wrapper_inside_is_part_of_the_block(device, pool):
    f, x = graphed(lambda a: a * 2, ladder=[4]), torch.ones(4, WIDTH, device=device)
    f(x)
    before = f.report().replays
    with capture_block(pool=pool) as block:
        y = f(x) + 1
    x.fill_(5)
    block.replay()
    assert same(y, x * 2 + 1)
    assert f.report().replays == before


def test_what_cannot_be_captured_is_named_with_its_line_and_does_no_harm(device, pool):
    x = torch.ones(4, device=device)
    block = capture_block(pool=pool)
    with pytest.raises(CaptureError) as caught, block as block:
        x.mul_((x * 2).sum().item())  # this line
    assert "# this line" in caught.value.where
    with pytest.raises(CaptureError, match="has not been captured"):
        block.replay()
    with capture_block(pool=pool) as block:
        y = x * 3
    block.replay()
    assert same(y, x * 3)
    with pytest.raises(ZeroDivisionError), capture_block(pool=pool):
        x.add_(1 / 0)
    assert same(x, torch.ones_like(x))


def test_a_block_inside_a_recording_is_refused(device, pool):
    x = torch.ones(4, device=device)
    with capture_block(pool=pool) as outer:
        y = x * 2
        with pytest.raises(CaptureError, match="capture inside capture"):
            with capture_block(pool=pool):
                x * 3
    outer.replay()
    assert same(y, x * 2)
    assert not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing()


def test_it_cannot_be_replayed_before_its_end(device, pool):
    with capture_block(pool=pool) as block:
        with pytest.raises(CaptureError, match="still running"):
            block.replay()


def test_a_tensor_that_moved_or_is_gone_is_an_error_and_nothing_runs(device, pool):
    layer, x = nn.Linear(WIDTH, WIDTH).to(device), torch.ones(2, WIDTH, device=device)
    count = torch.zeros(1, device=device)
    with torch.no_grad():
        ran_before(lambda: layer(x))
        with capture_block(pool=pool) as block:
            count.add_(1)
            y = layer(x)
    block.replay()
    old = layer.weight.data
    layer.weight.data = old.clone()
    with pytest.raises(AddressError, match=r"float32\[8, 8\].* capture the block again"):
        block.replay()
    assert count.item() == 1
    layer.weight.data = old
    block.replay()
    layer.bias = nn.Parameter(torch.zeros(WIDTH, device=device))
    with pytest.raises(AddressError, match="gone"):
        block.replay()
    assert count.item() == 2
    del y


def test_watched_tensors_are_named(device, pool):
    layer, x = nn.Linear(WIDTH, WIDTH).to(device), torch.ones(2, WIDTH, device=device)
    kept = layer.weight  # as an optimizer keeps it: it is not gone
    with torch.no_grad():
        ran_before(lambda: layer(x))
        with capture_block(pool=pool, watch=layer) as block:
            layer(x)
    block.replay()
    layer.weight = nn.Parameter(kept.detach().clone())
    with pytest.raises(AddressError, match="weight"):
        block.replay()


def test_what_the_block_makes_may_go(device, pool):
    x, out = torch.ones(4, device=device), torch.zeros(4, device=device)
    with capture_block(pool=pool) as block:
        constant = torch.full((4,), 2.0, device=device)
        number = torch.tensor(3.0)
        out.copy_(x * constant * number)
    del constant, number
    gc.collect()
    block.replay()
    assert out.tolist() == [6, 6, 6, 6]


def test_garbage_is_not_collected_meanwhile(device, pool):
    was = gc.isenabled()
    with capture_block(pool=pool):
        assert not gc.isenabled()
    assert gc.isenabled() == was
    with capture_block(pool=pool, freeze_gc=False):
        assert gc.isenabled() == was


def test_other_threads_wait_with_their_graphs(device, pool):
    f, x = graphed(lambda a: a * 2, ladder=[4]), torch.ones(4, WIDTH, device=device)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (f(x), done.set()), daemon=True)
    with capture_block(pool=pool) as block:
        y = x + 1
        thread.start()
        assert not done.wait(0.2)
    thread.join(20)
    assert done.is_set()
    block.replay()
    assert same(y, x + 1)


def test_an_open_gate_stays_open(device, pool):
    x = torch.ones(4, device=device)
    with capture_gate():
        with capture_block(pool=pool):
            x * 2
        with capture_block(pool=pool) as block:
            y = x * 3
    block.replay()
    assert same(y, x * 3)


def test_autocast_belongs_to_the_block(device, pool):
    layer, x = nn.Linear(WIDTH, WIDTH).to(device), torch.ones(2, WIDTH, device=device)

    def step():
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            return layer(x)

    ran_before(step)
    with capture_block(pool=pool) as block:
        y = step()
    with torch.no_grad():
        layer.weight.mul_(2)
    block.replay()
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, step())
