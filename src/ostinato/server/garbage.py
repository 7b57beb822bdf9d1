"""Garbage collection in processes that should never stand still."""

from __future__ import annotations

import gc

NEW_OBJECTS = 20_000
"""Between two collections: what a request leaves behind is freed by its references, cycles are few."""


def spare_long_lived_objects() -> None:
    """Take everything alive now out of all collections: going through torch's modules takes tens of
    milliseconds, in which no stream and no step gets on."""
    if gc.get_freeze_count():
        return  # an engine that was started again has left nothing new
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, 20, 20)
