"""Random numbers of Python and NumPy: graphs do not draw them; replays would repeat those of the capture."""

import random
from collections.abc import Callable, Iterator
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
    """The state of both generators; equal as long as nothing is drawn."""
    state: Any = np.random.get_state()
    return random.getstate(), state[1].tobytes(), state[2:]


@contextmanager
def undone() -> Iterator[None]:
    """A context for trial runs: restores the generators, so that the actual step draws the same numbers."""
    before, put_back = generators(), putting_back()
    try:
        yield
    finally:
        if generators() != before:
            put_back()


def putting_back() -> Callable[[], None]:
    """A function that sets both generators to where they are now."""
    of_python, of_numpy = random.getstate(), np.random.get_state()

    def put_back() -> None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)

    return put_back


@contextmanager
def refused_in_graphs() -> Iterator[None]:
    """A context that raises CaptureError if a step draws while it is recorded."""
    if not is_recording():
        yield
        return
    before = generators()
    try:
        yield
    finally:
        if generators() != before:
            raise CaptureError(WHY_NOT)
