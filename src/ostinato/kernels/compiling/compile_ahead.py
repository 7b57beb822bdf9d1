"""Compiles kernels several at a time, by running steps in which nothing is launched.

A kernel takes about half a second to compile and to load, and a model needs a few dozen. Running a step here
only collects what it would launch, with the very arguments that decide what is compiled. Results of such a
step are garbage: only numbers may depend on them, never an index.

Processes compile into Triton's cache on disk, CUDA C++ as well, and this process then finds everything there.
Meanwhile it may do something else:

    this process   |collect ....|read weights .......|wait|load
    processes           |the longest kernels ...........|
                                |all others ........|
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any

import torch

from .. import on_chip_memory
from ..cuda.compiled import CudaKernel, is_compiling_only, load_all
from ..cuda.compiled import compiling_only as cuda_kernels_compiled_only
from . import triton_start
from .compiling_processes import CompilingProcesses, Job

_SLOWEST_HIT_SECONDS = 0.1
"""A kernel that takes longer was not on disk, and those after it will not be either. (Compiling a small one
takes a quarter of a second, reading it some 20 milliseconds.)"""

_CALLS = re.compile(r"(?<!def )\b(\w+)\(")
"""Of functions by their names."""
_TRITON_WEIGHT = 5
"""A character of a Triton kernel takes about as long to compile as this many of CUDA C++, if those of what it
calls count as well."""
_WEIGHTS = {"_attend_chunks": 10.0, "_skinny": 0.8}
"""Of kernels for which it does not: loops that are unrolled, and branches of which few are ever compiled."""
_LONG = 150_000
"""Cost of a kernel that others do not have to wait for: a second and a half, and two and a half."""


class _Pending(Future[Any]):
    """Of a kernel that is compiled later, unless somebody cannot wait."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self._turn = threading.Lock()

    def compile(self) -> None:
        """Do it here, if nobody has."""
        with self._turn:
            if self.done():
                return
            try:
                self.set_result(self.job.compile())
            except Exception as error:
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        """Who asks for it before its time needs it now."""
        self.compile()
        return super().result(timeout)


class _Collector(Executor):
    """Takes jobs in and does nothing with them before `run`."""

    def __init__(self, processes: CompilingProcesses, num_on_disk: int | None) -> None:
        """`num_on_disk`: how many kernels are; None: nobody knows."""
        self._processes, self._num_on_disk = processes, num_on_disk
        self._pending: list[_Pending] = []
        self._beside: list[Job] = []
        self._begun: set[int] = set()
        """Jobs of processes, by their `id`."""
        self.cost = 0
        """Of what is submitted next."""

    def submit(self, job: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        pending = _Pending(Job(self.cost, functools.partial(job, *args, **options)))
        self._pending.append(pending)
        self._begin_long(pending.job)
        return pending

    def add(self, job: Job) -> None:
        """Adds a job for the processes that nobody waits for."""
        self._beside.append(job)
        self._begin_long(job)

    @property
    def _is_cold(self) -> bool:
        """Tells whether kernels are missing on disk, as far as is known."""
        return self._num_on_disk is not None and self._num_on_disk < len(self._pending)

    def _begin_long(self, job: Job) -> None:
        if job.cost >= _LONG and self._is_cold:
            self._begin([job])

    def _begin(self, jobs: Iterable[Job]) -> None:
        new = [job for job in jobs if id(job) not in self._begun]
        self._begun.update(map(id, new))
        self._processes.begin(new)

    def begin(self) -> None:
        """Have processes do everything, unless it is on disk already."""
        if self._is_cold:
            self._begin([*(pending.job for pending in self._pending), *self._beside])

    def run(self) -> None:
        """Do what processes have not done, which is only to read where they have. Nobody may know what is on
        disk, and what is may be of other models: the first kernel that takes long shows."""
        self._processes.wait()
        for number, pending in enumerate(self._pending, 1):
            started = time.perf_counter()
            pending.compile()
            is_slow = time.perf_counter() - started > _SLOWEST_HIT_SECONDS
            if is_slow and not self._begun:
                self._begin([*(each.job for each in self._pending[number:]), *self._beside])
                self._processes.wait()

    def give_up(self) -> None:
        """Whoever waits for a job that was not run is told so."""
        for pending in self._pending:
            if not pending.done():
                pending.set_exception(RuntimeError("not compiled: an error or an interrupt came first"))


_one_at_a_time = threading.RLock()
"""What is collected is collected by a change to Triton, which is there once. Whoever asked for a kernel that
another compilation has collected would get it from there, or the error that ended that."""


class Compilation:
    """Of kernels that are collected first; at the end of its context they are compiled and loaded."""

    def __init__(self, device: torch.device) -> None:
        import triton

        self._device, self._triton = device, triton
        self._processes = CompilingProcesses()
        self._collector = _Collector(self._processes, _num_on_disk(triton))
        self._kernels: dict[int, Any] = {}
        self._functions: dict[int, Any] = {}
        self._cuda_kernels: Mapping[CudaKernel, tuple[int, int]] = {}
        self._noted: set[CudaKernel] = set()
        self._mode: Any = nullcontext()

    def __enter__(self) -> Compilation:
        _one_at_a_time.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._compile()
            else:
                self._abandon()
        finally:
            self._processes.end()
            _one_at_a_time.release()

    def _compile(self) -> None:
        try:
            self.begin()
            self._collector.run()
        except BaseException:
            self._abandon()
            raise
        self._processes.end()
        self._mode.__exit__(None, None, None)
        load_all(self._cuda_kernels, self._device)
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
            list(threads.map(lambda kernel: _load(kernel, self._device), self._kernels.values()))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collects the kernels that this thread launches inside, which do not run; can be entered once."""
        with cuda_kernels_compiled_only() as self._cuda_kernels, self._triton_kernels():
            yield

    def begin(self) -> None:
        """Have processes compile what was collected, unless it is on disk, while this one goes on."""
        self._note_cuda_kernels()
        self._collector.begin()

    @contextmanager
    def _triton_kernels(self) -> Iterator[None]:
        triton = self._triton
        launch = triton.runtime.JITFunction.run
        triton_is_ready = functools.cache(triton_start.finish)  # not before it is needed

        def compile_instead(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if not is_compiling_only():  # another thread
                return launch(function, *args, grid=grid, warmup=warmup, **options)
            triton_is_ready()
            self._note_cuda_kernels()
            self._functions[id(function)] = function
            self._collector.cost = _cost(function)
            kernel = launch(function, *args, grid=grid, warmup=True, **options)
            self._kernels[id(kernel)] = kernel
            return kernel

        # A Triton that knows no postponed compilation does it one after the other.
        postponed = getattr(triton, "AsyncCompileMode", None)
        if postponed is not None:
            self._mode = postponed(self._collector)
        self._mode.__enter__()
        try:
            triton.runtime.JITFunction.run = compile_instead
            yield
        finally:
            triton.runtime.JITFunction.run = launch
            triton_is_ready()

    def _note_cuda_kernels(self) -> None:
        """Those that were asked for since. This may fork, so Triton's own start must be over."""
        for kernel in self._cuda_kernels.keys() - self._noted:
            self._noted.add(kernel)
            capability = torch.cuda.get_device_capability(self._device)
            self._collector.add(Job(kernel.compile_cost, functools.partial(kernel.compile, capability)))

    def _abandon(self) -> None:
        # Leaving waits for every job, and a job that nobody runs must not stand for its kernel ever after.
        self._collector.give_up()
        _forget_unfinished(self._functions.values())
        with suppress(Exception):
            self._mode.__exit__(None, None, None)


@contextmanager
def compiling_only(device: torch.device) -> Iterator[None]:
    """Collects kernels that this thread launches inside; leaving waits until they are compiled and loaded."""
    with Compilation(device) as compilation, compilation.collecting():
        yield


def _cost(function: Any) -> int:
    return round(_WEIGHTS.get(function.__name__, _TRITON_WEIGHT) * _length_inlined(function))


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
    on_chip_memory.loaded(kernel, compiled)
