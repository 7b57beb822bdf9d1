"""Tells code that asks whether it is being captured that it is, where no CUDA stream is."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .replaced import replaced


@contextmanager
def answering_capture_queries(is_active: Callable[[], bool]) -> Iterator[None]:
    """Make `torch.cuda.is_current_stream_capturing()` tell this thread that it is recording."""
    original = torch.cuda.is_current_stream_capturing
    owner = threading.get_ident()

    def is_current_stream_capturing() -> bool:
        return is_active() if threading.get_ident() == owner else original()

    name = "is_current_stream_capturing"
    with (
        replaced(torch.cuda, name, is_current_stream_capturing),
        replaced(torch.cuda.graphs, name, is_current_stream_capturing),
    ):
        yield
