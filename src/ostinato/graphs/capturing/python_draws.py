"""Random numbers of Python and NumPy: no graph draws them, so a replay would repeat those of its capture."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import CaptureError
from .gate import is_recording

WHY_NOT = (
    "the step draws from Python's or NumPy's random generator, and a graph would repeat the same draw: draw "
    "with torch"
)


def generators() -> tuple[Any, ...]:
    """Where both are; equal as long as nobody draws."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]


@contextmanager
def undone() -> Iterator[None]:
    """Around trial runs: what they draw is drawn once more by the step that counts."""
    before, of_python, of_numpy = generators(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        if generators() != before:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


@contextmanager
def refused_in_graphs() -> Iterator[None]:
    """CaptureError for a step that draws while it is recorded, whatever else comes of that."""
    if not is_recording():
        yield
        return
    before = generators()
    try:
        yield
    finally:
        if generators() != before:
            raise CaptureError(WHY_NOT)
