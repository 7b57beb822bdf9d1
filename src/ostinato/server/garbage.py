"""Garbage collection in processes that should never stand still."""

from __future__ import annotations

import gc
from functools import cache

NEW_OBJECTS = 20_000
"""Between two collections: what a request leaves behind is freed by its references, cycles are few."""


@cache
def spare_long_lived_objects() -> None:
    """Take everything alive now out of all collections: going through torch's modules takes tens of
    milliseconds, in which no stream and no step gets on. Once in a process: requests are alive later."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, 20, 20)
