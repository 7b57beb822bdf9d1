"""Compiles kernels several at a time, by running steps in which they are not launched.

A kernel takes about half a second to compile and to load, and a model needs a few dozen. Running a step here
only collects what it would launch, with the very arguments that decide what is compiled. Results of such a
step are garbage: only numbers may depend on them, never an index. A kernel that was compiled before is
launched.

Most of a compilation by Triton is Python, so threads would take turns: forked processes compile into Triton's
cache on disk, CUDA C++ as well, and this process then finds everything there. A child touches no CUDA and
ends without cleaning up. What a child did not get done (it may hang, forked while another thread held a lock)
is compiled here.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch

from .cuda.compiled import CudaKernel
from .cuda.compiled import compiling_only as cuda_kernels_compiled_only

_PATIENCE_SECONDS = 60.0
_SLOWEST_HIT_SECONDS = 0.1
"""A first kernel that takes longer was not on disk, and the others will not be either. (Compiling a small one
takes a quarter of a second, reading it some 20 milliseconds.)"""


_NUMBER_BYTES = 2
"""Of a job: all numbers together must fit into a pipe, which takes 64 KiB."""


class _Collector(Executor):
    """Takes jobs in and does nothing with them before `run`."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, job: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((future, lambda: job(*args, **options)))
        return future

    def run(self, num_on_disk: int | None = None, beside: Sequence[Callable[[], Any]] = ()) -> None:
        """Compile everything; unless it is on disk already, by processes, whose work is then found there.

        `num_on_disk`: how many kernels are; where that is fewer than the jobs, no job is tried first, and the
        processes do what is `beside` the jobs, too.
        """
        is_cold = num_on_disk is not None and num_on_disk < len(self._jobs)
        if is_cold:
            # A step ends with sampling, whose kernels take longest: the last come first.
            _in_processes([job for _, job in reversed(self._jobs)] + list(beside))
        started = time.perf_counter()
        for number, (future, job) in enumerate(self._jobs):
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            if number == 0 and not is_cold and time.perf_counter() - started > _SLOWEST_HIT_SECONDS:
                _in_processes([job for _, job in self._jobs[1:]])


@contextmanager
def compiling_only(device: torch.device) -> Iterator[None]:
    """New kernels inside are compiled and not run; leaving waits until they are loaded."""
    with cuda_kernels_compiled_only(device) as cuda_kernels:
        with _triton_kernels_compiled_only(device, cuda_kernels):
            yield


@contextmanager
def _triton_kernels_compiled_only(device: torch.device, cuda_kernels: Iterable[CudaKernel]) -> Iterator[None]:
    triton = sys.modules.get("triton")
    if triton is None:
        yield
        return
    launch = triton.runtime.JITFunction.run
    kernels: dict[int, Any] = {}

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        if not hasattr(kernel, "result") and kernel.module is not None:
            return launch(self, *args, grid=grid, warmup=False, **options)
        kernels[id(kernel)] = kernel
        return kernel

    collector = _Collector()
    # A Triton that knows no postponed compilation does it one after the other.
    postponed = getattr(triton, "AsyncCompileMode", None)
    with postponed(collector) if postponed else nullcontext():
        triton.runtime.JITFunction.run = compile_instead
        try:
            yield
        finally:
            triton.runtime.JITFunction.run = launch
            capability = torch.cuda.get_device_capability(device)
            beside = [functools.partial(kernel.compile, capability) for kernel in cuda_kernels]
            collector.run(_num_on_disk(triton), beside)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        list(threads.map(lambda kernel: _load(kernel, device), kernels.values()))


def _num_on_disk(triton: Any) -> int | None:
    """Kernels that Triton has kept at most: each has a folder of its own. None where that is not known."""
    if not hasattr(triton, "knobs"):
        return None
    try:
        return len(os.listdir(triton.knobs.cache.dir))
    except FileNotFoundError:
        return 0


def _load(kernel: Any, device: torch.device) -> None:
    """Put the kernel on the device and build what launches it: the first look at `run` does that."""
    torch.cuda.set_device(device)
    compiled = kernel.result() if hasattr(kernel, "result") else kernel
    assert callable(compiled.run)


def _in_processes(jobs: list[Callable[[], Any]]) -> None:
    count = min(16, os.cpu_count() or 1, len(jobs))
    if count < 2 or not hasattr(os, "fork"):
        return
    children = []
    # Some kernels take ten times as long as others: who is free takes the next number out of the pipe.
    numbers, given = os.pipe()
    os.write(given, b"".join(number.to_bytes(_NUMBER_BYTES, "little") for number in range(len(jobs))))
    os.close(given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: see above
        for _ in range(count):
            child = os.fork()
            if child == 0:
                _work_and_exit(jobs, numbers)
            children.append(child)
    os.close(numbers)
    _wait_for(children)


def _work_and_exit(jobs: list[Callable[[], Any]], numbers: int) -> None:
    try:
        gc.disable()  # collecting here what belongs to CUDA would call it
        while number := os.read(numbers, _NUMBER_BYTES):
            with suppress(Exception):  # the parent comes to it too, and tells
                jobs[int.from_bytes(number, "little")]()
    finally:
        os._exit(0)  # whatever is missing is compiled by the parent, which also tells what is wrong with it


def _wait_for(children: list[int]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while children and time.monotonic() < deadline:
        children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
        time.sleep(0.005)
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, 9)
        os.waitpid(child, 0)
