"""A kernel that compiles or tunes itself while a graph is being recorded fails or records garbage.

Warm-ups exist to prevent that. This guard turns the case that slips through into an error that names the
kernel.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..blame import calling_line
from ..errors import ColdKernelError


@contextmanager
def refuse_cold_kernels() -> Iterator[None]:
    """Refuse Triton and torch.compile compilation in this context. Costs nothing where neither is in use."""
    with _refuse_triton(), _refuse_dynamo():
        yield


@contextmanager
def _refuse_triton() -> Iterator[None]:
    triton = sys.modules.get("triton")
    if triton is None:
        yield
        return
    runtime = triton.knobs.runtime
    before = runtime.jit_cache_hook
    owner = threading.get_ident()

    def refuse(*, fn: Any, **more: Any) -> Any:
        if threading.get_ident() != owner:  # another thread compiles what it likes
            return None if before is None else before(fn=fn, **more)
        raise ColdKernelError(
            f"Triton kernel {fn.module}.{fn.name} was compiled during recording: warm it up first, with the "
            f"argument types and constants it is captured with",
            where=calling_line(),
        )

    runtime.jit_cache_hook = refuse
    try:
        yield
    finally:
        runtime.jit_cache_hook = before


@contextmanager
def _refuse_dynamo() -> Iterator[None]:
    if "torch._dynamo" not in sys.modules:
        yield
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None and dynamo.utils.counters["stats"]:
            raise ColdKernelError("torch.compile compiled something during recording: warm it up first")
        return
    import torch

    with torch.compiler.set_stance("fail_on_recompile"):
        yield
