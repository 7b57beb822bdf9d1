"""How long things take, on the host and on the device."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def host_us(call: Callable[[], Any], device: torch.device, *, burst: int = 100, bursts: int = 15) -> float:
    """Microseconds of CPU time per call, median over bursts.

    Each burst starts with an idle device and is short enough not to fill the launch queue, so waiting for
    the device is not counted.
    """
    for _ in range(20):
        call()
    times = []
    for _ in range(bursts):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(burst):
            call()
        times.append((time.perf_counter() - started) / burst * 1e6)
    synchronize(device)
    return statistics.median(times)


def wall_us(call: Callable[[], Any], device: torch.device, *, repeats: int = 20, rounds: int = 9) -> float:
    """Microseconds per call until the device is done, calls queued back to back, median over rounds."""
    for _ in range(5):
        call()
    times = []
    for _ in range(rounds):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        synchronize(device)
        times.append((time.perf_counter() - started) / repeats * 1e6)
    return statistics.median(times)


def device_us(call: Callable[[], Any], device: torch.device, *, repeats: int = 20, rounds: int = 9) -> float:
    """Microseconds of device time per call, by events on CUDA; the wall time on a CPU."""
    if device.type != "cuda":
        return wall_us(call, device, repeats=repeats, rounds=rounds)
    for _ in range(5):
        call()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end) / repeats * 1e3)
    return statistics.median(times)


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
