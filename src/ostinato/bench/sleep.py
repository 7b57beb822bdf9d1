"""What it takes to give a model's memory back and to take it again, beside the host link's own speed.

python -m ostinato.bench.sleep benchmarks/results/sleep-h200.json

Memory of the shapes of an 8B: 291 tensors of weights (16 GB in bf16), a KV cache, a captured graph with its
pool. Level 1 backs weights up to pinned memory, level 2 drops them. Links are measured in the same run, with
copies between the device and memory that torch has pinned. GPU only; times are medians.

Two things may slow a resume down and are measured apart: where the copies come from and go to, and on how
many streams (`ways_in_gb_s`); and memory that somebody has just freed, which the driver has to clear
(`1 without garbage`).
"""

import argparse
import gc
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from ostinato.memory import MemorySaver, Paused, Resumed
from ostinato.memory.pinned import pinned_buffers

from ..tools.machine import machine
from ..tools.results import write_json

GIB = 1 << 30
HIDDEN, INTERMEDIATE, QKV, VOCABULARY, LAYERS = 4096, 14336, 6144, 128256, 32
LAYER = ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))

SMALL = 0x3C00
"""About 0.008 in bf16; with a small number added still about that."""


def weights_of(saver: MemorySaver, gigabytes: float) -> list[torch.Tensor]:
    """Tensors of as many layers as make so many bytes, and norms."""
    made: list[torch.Tensor] = []
    with saver.region("weights"):
        made += [torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        while sum(each.nbytes for each in made) < gigabytes * 1e9:
            made += [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in LAYER]
            made += [torch.empty(HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for number, tensor in enumerate(made):
        tensor.view(torch.int16).fill_(SMALL + number)
    return made


def captured(saver: MemorySaver, weights: list[torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph that reads weights and has large intermediates."""
    with saver.region("graphs", "once"):
        x = torch.ones(4096, HIDDEN, dtype=torch.bfloat16, device="cuda")

    def step() -> torch.Tensor:
        wide = (x @ weights[4].T).relu()
        return (wide[:, :INTERMEDIATE] @ weights[5].T).sum(1)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    pool = saver.graph_pool()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        out = step()
    return graph, out


def link_speed(to_host: bool, nbytes: int = GIB, repeats: int = 8) -> float:
    """GB/s of copies between the device and pinned memory."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    source, target = (device, host) if to_host else (host, device)
    target.copy_(source, non_blocking=True)
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return nbytes / statistics.median(seconds) / 1e9


def ways_in(saver: MemorySaver, nbytes: int = 4 * GIB) -> dict[str, float]:
    """GB/s of copies from the host: from memory that torch has pinned and that backups are made of, to memory
    of torch and of a saver, on one stream and on several."""
    by_torch = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    [backup] = pinned_buffers([nbytes], driver, nullcontext)
    plain = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    saved = saver.empty((nbytes,), torch.uint8, "kv_cache", "scratch").zero_()
    found = {}
    for source, host in (("torch", by_torch.data_ptr()), ("backup", backup.address)):
        for target, device in (("torch", plain.data_ptr()), ("saver", saved.data_ptr())):
            for streams in (1, 2, 4):
                seconds = statistics.median(copy_in(host, device, nbytes, streams) for _ in range(3))
                found[f"{source} to {target}, {streams} streams"] = nbytes / seconds / 1e9
    backup.free()
    return found


def copy_in(host: int, device: int, nbytes: int, streams: int, piece: int = 64 << 20) -> float:
    """Seconds, in pieces by turns over so many streams."""
    on = [torch.cuda.Stream() for _ in range(streams)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for number, at in enumerate(range(0, nbytes, piece)):
        stream = driver.CUstream(on[number % streams].cuda_stream)
        [result] = driver.cuMemcpyHtoDAsync(device + at, host + at, min(piece, nbytes - at), stream)
        assert int(result) == 0, result
    torch.cuda.synchronize()
    return time.perf_counter() - start


def in_huge_pages() -> int:
    """Bytes of this process that lie in pages of 2 MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))


def free_bytes() -> int:
    """By cudaMemGetInfo, with nothing that torch keeps back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def cycle(saver: MemorySaver, *, backup: bool, garbage: float) -> tuple[Paused, Resumed, float, float, int]:
    """A pause, garbage in a share of what came free, and a resume; with seconds and these bytes."""
    before = free_bytes()
    start = time.perf_counter()
    paused = saver.pause(backup=backup)
    pause_s = time.perf_counter() - start
    came_free = free_bytes() - before
    if garbage:
        other = torch.empty(int(came_free * garbage), dtype=torch.uint8, device="cuda").fill_(0x5A)
        torch.cuda.synchronize()
        del other
        torch.cuda.empty_cache()
    start = time.perf_counter()
    resumed = saver.resume()
    return paused, resumed, pause_s, time.perf_counter() - start, came_free


def seconds_of(report: Any) -> dict[str, float]:
    """Returns the times of a pause or a resume, by part."""
    seconds: dict[str, float] = report.seconds
    return seconds


def measured(saver: MemorySaver, *, backup: bool, repeats: int, garbage: float = 0.95) -> dict[str, Any]:
    """Medians of so many cycles."""
    rows = [cycle(saver, backup=backup, garbage=garbage) for _ in range(repeats)]
    paused, resumed = rows[-1][:2]
    reports: tuple[tuple[int, str, Any], ...] = ((0, "pause", paused), (1, "resume", resumed))
    parts = {
        f"{verb}_{part}_s": statistics.median(seconds_of(row[at])[part] for row in rows)
        for at, verb, report in reports
        for part in report.seconds
    }
    return {
        "released": paused.released,
        "came_free": min(row[4] for row in rows),
        "backed_up": paused.backed_up,
        "restored": resumed.restored,
        "pause_s": statistics.median(row[2] for row in rows),
        "resume_s": statistics.median(row[3] for row in rows),
        **parts,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--gigabytes", type=float, default=16.0, help="of weights")
    parser.add_argument("--kv-gigabytes", type=float, default=32.0)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    links = {"to_host_gb_s": link_speed(True), "to_device_gb_s": link_speed(False)}
    baseline = free_bytes()
    saver = MemorySaver("cuda")
    weights = weights_of(saver, asked.gigabytes)
    kv = saver.empty((int(asked.kv_gigabytes * 1e9),), torch.uint8, "kv_cache", "scratch")
    saver.on_resume("kv_cache", kv.zero_)
    graph, out = captured(saver, weights)
    graph.replay()
    wanted = out.clone()
    taken = baseline - free_bytes()
    start, huge = time.perf_counter(), in_huge_pages()
    room = saver.prepare_backup()
    prepare_s = time.perf_counter() - start
    huge = in_huge_pages() - huge
    levels = {"1": measured(saver, backup=True, repeats=asked.repeats)}
    graph.replay()
    assert torch.equal(out, wanted), "the graph gives something else after level 1"
    for number, tensor in enumerate(weights):
        assert (tensor.view(torch.int16) == SMALL + number).all(), f"weight {number} is not what it was"
    levels["1 without garbage"] = measured(saver, backup=True, repeats=asked.repeats, garbage=0)
    levels["2"] = measured(saver, backup=False, repeats=asked.repeats)
    for number, tensor in enumerate(weights):
        tensor.view(torch.int16).fill_(SMALL + number)
    graph.replay()
    assert torch.equal(out, wanted), "the graph gives something else after level 2"
    sizes = {
        f"{tag}/{content}": held.mapped for tag, of in saver.bytes().items() for content, held in of.items()
    }
    memory = {"taken": taken, "by_tag_and_class": sizes, "stays": taken - levels["1"]["came_free"]}
    print(f"taken {taken:,} bytes: " + ", ".join(f"{name} {size:,}" for name, size in sizes.items()))
    ways = ways_in(saver)
    for name, speed in ways.items():
        print(f"{name:24}: {speed:5.1f} GB/s")
    print(f"links: to host {links['to_host_gb_s']:.1f}, to device {links['to_device_gb_s']:.1f} GB/s")
    print(f"room for backups: {room:,} bytes in {prepare_s:.2f} s, {huge:,} of them in huge pages")
    print(
        f"{'level':17} | came free      | stays        | pause s | GB/s | of link | resume s | GB/s | of link"
    )
    for level, row in levels.items():
        speeds = [row["backed_up"] / row["pause_s"] / 1e9, row["restored"] / row["resume_s"] / 1e9]
        shares = [speeds[0] / links["to_host_gb_s"], speeds[1] / links["to_device_gb_s"]]
        row |= {"pause_share_of_link": shares[0], "resume_share_of_link": shares[1]}
        stays = taken - row["came_free"]
        print(
            f"{level:17} | {row['came_free']:14,} | {stays:12,} | {row['pause_s']:7.3f} | {speeds[0]:4.1f} | "
            f"{shares[0]:7.0%} | {row['resume_s']:8.3f} | {speeds[1]:4.1f} | {shares[1]:.0%}"
        )
        print("      " + ", ".join(f"{name} {row[name]:.4f}" for name in row if name.endswith("_s")))
    result = {
        "machine": machine(),
        "settings": {"gigabytes": asked.gigabytes, "kv_gigabytes": asked.kv_gigabytes},
        "links": links,
        "ways_in_gb_s": ways,
        "memory": memory,
        "prepare_backup_s": prepare_s,
        "backup_in_huge_pages": huge,
        "levels": levels,
    }
    write_json(result, asked.file)


if __name__ == "__main__":
    main()
