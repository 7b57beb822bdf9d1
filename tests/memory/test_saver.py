"""What `MemorySaver` promises on every device."""

import gc
import itertools
import threading
from collections.abc import Iterator

import pytest
import torch

from contract.steps import WIDTH, key, mlp, randn, x_field
from ostinato.graphs import (
    CaptureOptions,
    CudaGraphRunner,
    Dispatcher,
    GraphMode,
    GraphPool,
    InputBuffers,
    eager_boundary,
)
from ostinato.memory import Content, GraphMemory, MemorySaver, SaverError

from .known_numbers import MIB, filled, is_intact, leave_garbage


@pytest.fixture
def saver(device: torch.device) -> Iterator[MemorySaver]:
    made = MemorySaver(device, hostile=True)
    yield made
    if not made.is_closed:
        made.resume()
        made.close()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def test_every_class_comes_back_as_it_promises(saver, device):
    data, once = filled(saver, 2, "weights", "data"), filled(saver, 2, "weights", "once")
    scratch = saver.empty((MIB,), torch.bfloat16, "weights", "scratch").zero_()
    assert saver.kind_of(data) == ("weights", Content.DATA)
    assert saver.kind_of(once) == ("weights", Content.ONCE)
    assert saver.kind_of(scratch) == ("weights", Content.SCRATCH)
    saver.pause(backup=False)
    assert saver.resume().lost == ("weights",)
    assert is_intact(once)
    assert scratch.isnan().all()
    assert data.view(torch.float32).isnan().all()
    assert (data > 1 << 30).all()
    data.copy_(once)
    saver.pause(backup=True)
    assert saver.resume().lost == ()
    assert is_intact(data)
    assert is_intact(once)
    assert scratch.isnan().all()


def test_tags_wake_one_at_a_time_and_calls_may_be_repeated(saver):
    weights, kv = filled(saver, 4, "weights", "data"), filled(saver, 4, "kv_cache", "data")
    saver.pause(["kv_cache"])
    assert is_intact(weights)
    assert saver.paused == ("kv_cache",)
    assert saver.pause().tags == ("weights", "graphs")
    assert saver.pause().released == 0
    saver.resume(["weights"])
    assert is_intact(weights)
    assert saver.is_paused("kv_cache")
    held = saver.bytes()
    assert held["weights"][Content.DATA].mapped == held["kv_cache"][Content.DATA].released >= 4 * MIB
    assert held["weights"][Content.DATA].released == held["kv_cache"][Content.DATA].mapped == 0
    saver.resume()
    assert saver.resume().taken == 0
    assert is_intact(kv)


def test_what_is_written_again_at_resume_is_there_and_a_failure_leaves_it_paused(saver):
    table = filled(saver, 8, "kv_cache", "scratch")
    weights = filled(saver, 8, "kv_cache", "data")
    works = [False]

    def rewrite():
        if not works[0]:
            raise ValueError("not yet")
        table.copy_(torch.arange(table.numel(), dtype=torch.int32, device=table.device))

    saver.on_resume("kv_cache", rewrite)
    saver.pause()
    with pytest.raises(ValueError, match="not yet"):
        saver.resume()
    assert saver.is_paused("kv_cache")
    assert saver.bytes()["kv_cache"][Content.DATA].mapped == 0
    works[0] = True
    saver.resume()
    assert is_intact(table)
    assert is_intact(weights)


def test_a_tag_grows_between_pauses(saver, device):
    blocks, seeds = [], itertools.count()
    for _ in range(4):
        for mib in (4, 1, 2):
            seed = next(seeds)
            blocks.append((seed, filled(saver, mib, "weights", "data", seed)))
        saver.pause()
        leave_garbage(device, 16 * MIB)
        saver.resume()
        assert all(is_intact(block, seed) for seed, block in blocks)
        del blocks[1]


def test_many_small_tensors_of_a_region_share_blocks_and_all_come_back(saver, device):
    with saver.region("weights"):
        tensors = [torch.full((1000 + i,), float(i), device=device) for i in range(100)]
    assert saver.bytes()["weights"][Content.DATA].mapped <= 8 * MIB
    saver.pause()
    leave_garbage(device, 64 * MIB)
    saver.resume()
    assert all((tensor == i).all() for i, tensor in enumerate(tensors))


def test_the_innermost_region_counts(saver, device):
    with saver.region("weights"):
        outer = torch.ones(MIB, device=device)
        with saver.region("kv_cache", "scratch"):
            inner = torch.ones(MIB, device=device)
        after = torch.ones(MIB, device=device)
    beside = torch.ones(MIB, device=device)
    assert saver.kind_of(outer) == saver.kind_of(after) == ("weights", Content.DATA)
    assert saver.kind_of(inner) == ("kv_cache", Content.SCRATCH)
    assert saver.kind_of(beside) is None
    saver.pause()
    assert float(beside.sum()) == MIB
    saver.resume()
    assert float(outer.sum() + after.sum()) == 2 * MIB


def test_a_tag_that_is_paused_gives_nothing(saver):
    saver.pause(["weights"])
    with pytest.raises(SaverError, match="weights is paused"):
        saver.empty((4,), torch.int32, "weights")
    saver.pause(["graphs"])
    with pytest.raises(SaverError, match="graphs is paused"):
        saver.graph_pool()
    saver.resume()
    filled(saver, 4, "weights", "data")


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE])
def test_the_runtime_keeps_its_graphs_through_a_pause(saver, device, mode):
    pool = GraphPool(device, memory=GraphMemory(saver))
    buffers = InputBuffers([x_field()], max_tokens=8, device=device, allocate=pool.allocate)
    with saver.region("weights"):
        model = mlp(device)

    @eager_boundary
    def attend(x):
        return x + 1

    runner = CudaGraphRunner(
        lambda x: model(attend(model(x))),
        buffers,
        [key(n, mode) for n in (1, 2, 4, 8)],
        dispatcher=Dispatcher(mode),
        pool=pool,
        options=CaptureOptions(freeze_gc=False, strict=True),
    )
    runner.capture(progress=False)
    assert saver.kind_of(buffers.arena) == ("graphs", Content.ONCE)
    # Results of one piece that the next one reads are in memory of their own.
    assert sum(held.mapped for held in saver.bytes()["graphs"].values()) >= pool.bytes > 0
    batches = [{"x": randn(n, WIDTH, device=device, seed=n)} for n in (1, 3, 8, 5)]
    wanted = [runner.run(batch).clone() for batch in batches]
    graphs = dict(runner.graphs)
    for _ in range(5):
        released = saver.pause().released
        leave_garbage(device, released)
        saver.resume()
        for batch, expected in zip(batches, wanted, strict=True):
            assert torch.equal(runner.run(batch), expected)
    assert runner.graphs == graphs
    assert all(runner.graphs[each] is graph for each, graph in graphs.items())
    assert runner.report().eager_steps == {}
    runner.drop()


def test_threads_allocate_side_by_side_while_others_ask_the_allocator(saver, device):
    """Somebody who holds Python's lock and waits for torch's, while an allocation has torch's."""
    stop, failures, made = threading.Event(), [], []

    def ask():
        while not stop.is_set():
            if device.type == "cuda":
                torch.cuda.memory_stats(device)
            torch.empty(1000, device=device)

    def allocate(number):
        try:
            for each in range(10):
                seed = number * 1000 + each
                made.append((seed, filled(saver, 1, "weights", "data", seed)))
        except Exception as error:
            failures.append(repr(error))

    askers = [threading.Thread(target=ask) for _ in range(2)]
    threads = [threading.Thread(target=allocate, args=(number,)) for number in range(4)]
    for thread in [*askers, *threads]:
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    for thread in askers:
        thread.join(60)
    assert not any(thread.is_alive() for thread in [*askers, *threads]), "a deadlock"
    assert failures == []
    saver.pause()
    leave_garbage(device, 64 * MIB)
    saver.resume()
    assert len(made) == 40
    assert all(is_intact(block, seed) for seed, block in made)


def test_pauses_from_many_threads_take_turns_and_open_regions_refuse_them(saver, device):
    block, failures = filled(saver, 2, "weights", "data"), []

    def cycle():
        try:
            for _ in range(5):
                saver.pause(["weights"])
                saver.resume(["weights"])
        except Exception as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=cycle) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert is_intact(block)
    with saver.region("weights"):
        with pytest.raises(SaverError, match="weights cannot be paused while regions of it are open"):
            saver.pause()
        assert saver.pause(["kv_cache"]).tags == ("kv_cache",)
    saver.resume()


def test_a_closed_saver_refuses_and_its_tensors_live_on(device):
    saver = MemorySaver(device)
    data = filled(saver, 16, "weights", "data")
    saver.close()
    saver.close()
    with pytest.raises(SaverError, match="closed"):
        saver.pause()
    with pytest.raises(SaverError, match="closed"):
        saver.empty((4,), torch.int32, "weights")
    assert is_intact(data)
    del data
    gc.collect()
    torch.cuda.empty_cache()
