"""Compiles kernels several at a time, by running steps in which nothing is launched.

A kernel takes about half a second to compile and to load, and a model needs a few dozen. Running a step here
only collects what it would launch, with the very arguments that decide what is compiled. Results of such a
step are garbage: only numbers may depend on them, never an index.

Most of a compilation by Triton is Python, so threads would take turns: forked processes compile into Triton's
cache on disk, CUDA C++ as well, and this process then finds everything there. A child touches no CUDA and
ends without cleaning up. What a child did not get done (it may hang, forked while another thread held a lock)
is compiled here.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import logging
import os
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import triton_start
from .cuda.compiled import CudaKernel, is_compiling_only
from .cuda.compiled import compiling_only as cuda_kernels_compiled_only

logger = logging.getLogger("ostinato.kernels")

_PATIENCE_SECONDS = 60.0
_SLOWEST_HIT_SECONDS = 0.1
"""A first kernel that takes longer was not on disk, and the others will not be either. (Compiling a small one
takes a quarter of a second, reading it some 20 milliseconds.)"""


_NUMBER_BYTES = 2
"""Of a job: all numbers together must fit into a pipe, which takes 64 KiB."""

_CALLS = re.compile(r"(?<!def )\b(\w+)\(")
"""Of functions by their names."""
_TRITON_WEIGHT = 5
"""A character of a Triton kernel takes about as long to compile as this many of CUDA C++, if those of what it
calls count as well."""


class _Job(NamedTuple):
    """A compilation whose result stays on disk."""

    cost: int
    """How long it takes, compared with others: mostly the length of its source."""
    compile: Callable[[], Any]


class _Collector(Executor):
    """Takes jobs in and does nothing with them before `run`."""

    def __init__(self) -> None:
        self._jobs: list[tuple[Future[Any], _Job]] = []
        self.cost = 0
        """Of what is submitted next."""

    def submit(self, job: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.append((future, _Job(self.cost, functools.partial(job, *args, **options))))
        return future

    def run(self, num_on_disk: int | None = None, beside: Sequence[_Job] = ()) -> None:
        """Compile everything; unless it is on disk already, by processes, whose work is then found there.

        `num_on_disk`: how many kernels are; where that is fewer than the jobs, no job is tried first, and the
        processes do what is `beside` the jobs, too.
        """
        is_cold = num_on_disk is not None and num_on_disk < len(self._jobs)
        if is_cold:
            _in_processes([*(job for _, job in self._jobs), *beside])
        started = time.perf_counter()
        for number, (future, job) in enumerate(self._jobs):
            try:
                future.set_result(job.compile())
            except Exception as error:
                future.set_exception(error)
            if number == 0 and not is_cold and time.perf_counter() - started > _SLOWEST_HIT_SECONDS:
                _in_processes([job for _, job in self._jobs[1:]])

    def give_up(self) -> None:
        """Whoever waits for a job that was not run is told so."""
        for future, _ in self._jobs:
            if not future.done():
                future.set_exception(RuntimeError("not compiled: an error or an interrupt came first"))


_one_at_a_time = threading.RLock()
"""What is collected is collected by a change to Triton, which is there once."""


@contextmanager
def compiling_only(device: torch.device) -> Iterator[None]:
    """What this thread launches inside does not run; leaving waits until all of it is compiled and loaded."""
    with _one_at_a_time, cuda_kernels_compiled_only(device) as cuda_kernels:
        with _triton_kernels_compiled_only(device, cuda_kernels):
            yield


@contextmanager
def _triton_kernels_compiled_only(device: torch.device, cuda_kernels: Iterable[CudaKernel]) -> Iterator[None]:
    import triton

    launch = triton.runtime.JITFunction.run
    kernels: dict[int, Any] = {}
    functions: dict[int, Any] = {}
    collector = _Collector()
    triton_is_ready = functools.cache(triton_start.finish)  # not before it is needed

    def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not is_compiling_only():  # another thread
            return launch(self, *args, grid=grid, warmup=warmup, **options)
        triton_is_ready()
        functions[id(self)] = self
        collector.cost = _TRITON_WEIGHT * _length_inlined(self)
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        kernels[id(kernel)] = kernel
        return kernel

    # A Triton that knows no postponed compilation does it one after the other.
    postponed = getattr(triton, "AsyncCompileMode", None)
    mode = postponed(collector) if postponed else nullcontext()
    mode.__enter__()
    try:
        triton.runtime.JITFunction.run = compile_instead
        try:
            yield
        finally:
            triton.runtime.JITFunction.run = launch
            triton_is_ready()
        capability = torch.cuda.get_device_capability(device)
        beside = [
            _Job(kernel.compile_cost, functools.partial(kernel.compile, capability))
            for kernel in cuda_kernels
        ]
        collector.run(_num_on_disk(triton), beside)
    except BaseException:
        # Leaving waits for every job, and a job that nobody runs must not stand for its kernel ever after.
        collector.give_up()
        _forget_unfinished(functions.values())
        with suppress(Exception):
            mode.__exit__(None, None, None)
        raise
    mode.__exit__(None, None, None)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        list(threads.map(lambda kernel: _load(kernel, device), kernels.values()))


@functools.cache
def _length_inlined(function: Any) -> int:
    """Characters of a Triton function and, as often as they are called, of those that it calls."""
    called = [function.fn.__globals__.get(name) for name in _CALLS.findall(function.src)]
    return len(function.src) + sum(
        _length_inlined(each) for each in called if isinstance(each, type(function))
    )


def _forget_unfinished(functions: Iterable[Any]) -> None:
    """Let the next launch compile what is still to come, instead of waiting for it."""
    for function in functions:
        for kernels, *_ in function.device_caches.values():
            for key in [key for key, kernel in kernels.items() if type(kernel).__name__ == "FutureKernel"]:
                del kernels[key]


def _num_on_disk(triton: Any) -> int | None:
    """Kernels that Triton has kept at most: each has a folder of its own. None where that is not known."""
    if not hasattr(triton, "knobs"):
        return None
    try:
        return len(os.listdir(triton.knobs.cache.dir))
    except OSError:
        return 0


def _load(kernel: Any, device: torch.device) -> None:
    """Put the kernel on the device and build what launches it: the first look at `run` does that."""
    torch.cuda.set_device(device)
    compiled = kernel.result() if hasattr(kernel, "result") else kernel
    assert callable(compiled.run)


def _in_processes(unsorted_jobs: Iterable[_Job]) -> None:
    # Some kernels take ten times as long as others: those come first, and who is free takes the next.
    jobs = sorted(unsorted_jobs, key=lambda job: job.cost, reverse=True)
    count = min(16, os.cpu_count() or 1, len(jobs))
    if count < 2 or not hasattr(os, "fork"):
        return
    children: list[int] = []
    numbers, given = os.pipe()
    try:
        os.write(given, b"".join(number.to_bytes(_NUMBER_BYTES, "little") for number in range(len(jobs))))
        os.close(given)
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as claims:
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads: see above
            for _ in range(count):
                child = os.fork()
                if child == 0:
                    _work_and_exit(jobs, numbers, Path(claims))
                children.append(child)
            _wait_for(children)
    except OSError as error:  # no room for a process, or for a file
        logger.warning("kernels are compiled by fewer processes than there are processors: %s", error)
        _wait_for(children)
    finally:
        os.close(numbers)
        _end(children)


def _work_and_exit(jobs: list[_Job], numbers: int, claims: Path) -> None:
    try:
        gc.disable()  # collecting here what belongs to CUDA would call it
        while number := os.read(numbers, _NUMBER_BYTES):
            with suppress(Exception):  # the parent comes to it too, and tells
                compiled = jobs[int.from_bytes(number, "little")].compile()
                if hasattr(compiled, "metadata"):
                    _build_launcher(compiled, claims)
    finally:
        os._exit(0)  # whatever is missing is compiled by the parent, which also tells what is wrong with it


def _build_launcher(kernel: Any, claims: Path) -> None:
    """Triton 3.6 has a C compiler build what launches kernels with such arguments, and keeps that as well.

    Of all children one does it: whoever is first to make a file of that name.
    """
    import triton

    types = repr(list(kernel.src.signature.values()))
    with suppress(FileExistsError):
        (claims / hashlib.sha256(types.encode()).hexdigest()).touch(exist_ok=False)
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)


def _wait_for(children: list[int]) -> None:
    """Until all have ended, or for so long; those that have leave the list."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while children and time.monotonic() < deadline:
        children[:] = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
        time.sleep(0.005)


def _end(children: list[int]) -> None:
    for child in children:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, 9)
            os.waitpid(child, 0)
