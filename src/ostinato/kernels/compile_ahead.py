"""Compiles Triton kernels several at a time, by running steps in which they are not launched.

A kernel takes about half a second to compile and to load, most of it in other processes, and a model needs a
few dozen. Running a step here only collects what it would launch, with the very arguments that decide what is
compiled; the compilations run in threads meanwhile. Results of such a step are garbage: only numbers may
depend on them, never an index. A kernel that was compiled before is launched.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def compiling_only(device: torch.device) -> Iterator[None]:
    """New Triton kernels inside are compiled and not run; leaving waits until they are loaded."""
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

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        # A Triton that cannot compile in threads does it one after the other.
        in_threads = getattr(triton, "AsyncCompileMode", None)
        with in_threads(threads) if in_threads else nullcontext():
            triton.runtime.JITFunction.run = compile_instead
            try:
                yield
            finally:
                triton.runtime.JITFunction.run = launch
        list(threads.map(lambda kernel: _load(kernel, device), kernels.values()))


def _load(kernel: Any, device: torch.device) -> None:
    """Put the kernel on the device and build what launches it: the first look at `run` does that."""
    torch.cuda.set_device(device)
    if hasattr(kernel, "result"):  # what stood for a kernel that was still being compiled
        kernel = kernel.result()
    assert callable(kernel.run)
