"""Tells code that asks whether it is being captured that it is, where no CUDA stream is."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def answering_capture_queries(is_active: Callable[[], bool]) -> Iterator[None]:
    """Make `torch.cuda.is_current_stream_capturing()` tell this thread that it is recording."""
    original = torch.cuda.is_current_stream_capturing
    owner = threading.get_ident()

    def is_current_stream_capturing() -> bool:
        return is_active() if threading.get_ident() == owner else original()

    modules: tuple[Any, ...] = (torch.cuda, torch.cuda.graphs)
    before = [module.is_current_stream_capturing for module in modules]
    for module in modules:
        module.is_current_stream_capturing = is_current_stream_capturing
    try:
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            module.is_current_stream_capturing = function
