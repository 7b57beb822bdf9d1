"""`MemorySaver` on a GPU: what holds everywhere, and: memory goes back to the device, graphs stay."""

import subprocess
import sys
import threading

import pytest
import torch

from contract.steps import key, x_field
from memory.known_numbers import MIB, filled, free_bytes, is_intact, leave_garbage
from memory.test_saver import *  # noqa: F403
from ostinato.graphs import CaptureOptions, CudaGraphRunner, GraphPool, InputBuffers
from ostinato.memory import Content, GraphMemory, MemorySaver, SaverMemoryError

pytest.importorskip("cuda.bindings.driver")


def is_about(measured: int, expected: int) -> bool:
    """The driver takes and gives back pages of its own now and then."""
    return abs(measured - expected) <= 8 * MIB


# -- memory and contents ---------------------------------------------------------------------------


@pytest.mark.alone
def test_the_device_gets_every_byte_back_and_addresses_stay(saver, device):
    weights = [filled(saver, 64, "weights", "data", seed) for seed in range(4)]
    kv = saver.empty((512 * MIB,), torch.uint8, "kv_cache", "scratch")
    addresses = [tensor.data_ptr() for tensor in [*weights, kv]]
    saver.prepare_backup()
    leave_garbage(device, MIB)  # loads the kernel
    before = free_bytes(device)
    paused = saver.pause()
    assert paused.released == 768 * MIB
    assert paused.backed_up == 256 * MIB
    assert is_about(free_bytes(device) - before, paused.released)
    leave_garbage(device, paused.released)
    resumed = saver.resume()
    assert (resumed.taken, resumed.restored, resumed.lost) == (768 * MIB, 256 * MIB, ())
    assert is_about(free_bytes(device), before)
    assert addresses == [tensor.data_ptr() for tensor in [*weights, kv]]
    assert all(is_intact(tensor, seed) for seed, tensor in enumerate(weights))


@pytest.mark.alone
def test_twenty_cycles_grow_nothing(saver, device):
    weights = filled(saver, 256, "weights", "data")
    leave_garbage(device, saver.pause().released)
    saver.resume()
    before = free_bytes(device)
    for cycle in range(20):
        released = saver.pause(["weights"]).released
        leave_garbage(device, released)
        saver.resume()
        assert is_intact(weights, seed=cycle)
        weights += 1
    assert is_about(free_bytes(device), before)


@pytest.mark.alone
def test_too_little_memory_at_resume_takes_nothing_and_a_retry_works(saver, device):
    weights = [filled(saver, 512, "weights", "data", seed) for seed in range(4)]
    saver.pause()
    hog = torch.empty(free_bytes(device) - 1024 * MIB, dtype=torch.uint8, device=device)
    before = free_bytes(device)
    with pytest.raises(SaverMemoryError, match=r"2,147,483,648 bytes .* are free"):
        saver.resume()
    assert is_about(free_bytes(device), before), "what was mapped before it failed went back"
    assert saver.bytes()["weights"][Content.DATA].mapped == 0
    assert saver.paused == ("weights", "kv_cache", "graphs")
    del hog
    # torch keeps that memory back, which must not stand in the way.
    saver.resume()
    assert all(is_intact(tensor, seed) for seed, tensor in enumerate(weights))


@pytest.mark.alone
def test_what_is_dropped_while_paused_does_not_come_back(saver, device):
    start = free_bytes(device)
    kept = filled(saver, 64, "weights", "data")
    with saver.region("kv_cache", "scratch"):
        gone = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
    saver.pause()
    del gone
    saver.resume(["weights"])
    assert is_intact(kept)
    saver.resume()
    del kept
    saver.close()
    assert is_about(free_bytes(device), start), "a closed saver keeps nothing"


def test_too_little_memory_in_a_region_is_torchs_error_and_nothing_breaks(saver, device):
    with pytest.raises(torch.OutOfMemoryError), saver.region("weights"):
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    assert is_intact(filled(saver, 16, "weights", "data"))


@pytest.mark.alone
def test_contents_come_back_while_other_memory_is_taken_and_written(device):
    """Without hostile contents, which have to be there before anything else."""
    saver = MemorySaver(device)
    weights = [filled(saver, size, "weights", "data", seed) for seed, size in enumerate((300, 2, 129, 64))]
    tables = filled(saver, 32, "graphs", "once", 9)
    kv = saver.empty((2048 * MIB,), torch.uint8, "kv_cache", "scratch")
    saver.on_resume("kv_cache", kv.zero_)
    seen = []
    saver.on_resume("weights", lambda: seen.append(all(map(is_intact, weights, range(len(weights))))))
    for cycle in range(3):
        released = saver.pause().released
        leave_garbage(device, released)
        saver.resume(["graphs", "kv_cache"] if cycle == 1 else None)
        saver.resume()
        assert not kv.any()
        assert is_intact(tables, 9)
        assert all(map(is_intact, weights, range(len(weights))))
    assert seen == [True] * 3
    saver.close()


# -- graphs ----------------------------------------------------------------------------------------


def test_a_graph_of_torch_replays_over_memory_that_was_away(saver, device):
    with saver.region("weights"):
        weight = torch.randn(512, 512, device=device) * 0.05
    with saver.region("graphs", "once"):
        x = torch.randn(64, 512, device=device)
    stream = torch.cuda.Stream(device)

    def step():
        big = (x @ weight).repeat(64, 64).tanh()
        return (big @ big.T[:, :32]).sum(1)

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=saver.graph_pool(), stream=stream, capture_error_mode="thread_local"):
        out = step()
    assert saver.kind_of(out) == ("graphs", Content.SCRATCH)
    graph.replay()
    wanted, address = out.clone(), out.data_ptr()
    for _ in range(3):
        released = saver.pause().released
        leave_garbage(device, released)
        saver.resume()
        assert out.isnan().all(), "nobody has replayed it yet"
        graph.replay()
        assert torch.equal(out, wanted)
        assert out.data_ptr() == address
    weight.mul_(2.0)
    graph.replay()
    assert not torch.equal(out, wanted)
    del graph, out


# -- threads ---------------------------------------------------------------------------------------


def test_another_thread_may_allocate_while_a_graph_is_captured_into_a_savers_pool(saver, device):
    stop, failures = threading.Event(), []

    def elsewhere():
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                while not stop.is_set():
                    y = torch.ones(1 << 20, device=device)
                    torch.cuda.memory_stats(device)
                    if float((y * 2).sum()) != 2 << 20:
                        failures.append("a wrong sum")
        except Exception as error:
            failures.append(repr(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    try:
        for _ in range(5):
            pool = GraphPool(device, memory=GraphMemory(saver))
            buffers = InputBuffers([x_field()], max_tokens=8, device=device, allocate=pool.allocate)
            runner = CudaGraphRunner(
                lambda x: x[:, :1].expand(-1, 1 << 20).mul(2).sum(1),
                buffers,
                [key(n) for n in (2, 8)],
                pool=pool,
                options=CaptureOptions(freeze_gc=False, strict=True),
            )
            runner.capture(progress=False)
            runner.drop()
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive(), "a deadlock"
    assert failures == []


# -- backups and ends ------------------------------------------------------------------------------


def test_room_for_backups_can_be_made_before_and_given_back(saver):
    filled(saver, 4, "weights", "scratch")
    data = filled(saver, 128, "weights", "data")
    assert saver.prepare_backup() == 128 * MIB
    saver.pause()
    saver.drop_backups()
    assert saver.bytes()["weights"][Content.DATA].backup == 128 * MIB, "it is in use"
    saver.resume()
    assert is_intact(data)
    saver.drop_backups()
    assert saver.bytes()["weights"][Content.DATA].backup == 0
    saver.pause()
    saver.resume()
    assert is_intact(data)


def test_a_backup_larger_than_the_host_is_refused_before_anything_happens(saver, monkeypatch):
    from ostinato.memory import pinned

    data = filled(saver, 64, "weights", "data")

    def too_little(nbytes):
        raise SaverMemoryError("there is no room")

    monkeypatch.setattr(pinned, "_refuse_more_than_there_is", too_little)
    with pytest.raises(SaverMemoryError, match="no room"):
        saver.pause()
    assert saver.paused == ()
    assert is_intact(data)
    saver.pause(backup=False)
    saver.resume()


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_process_with_graphs_and_paused_memory_ends_without_a_word(is_paused):
    code = f"""
import torch
from ostinato.memory import MemorySaver
saver = MemorySaver("cuda")
with saver.region("weights"):
    w = torch.ones(1 << 22, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, pool=saver.graph_pool()):
    out = (w * 2).sum()
graph.replay()
assert float(out) == 2 << 22
if {is_paused}:
    saver.pause()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
