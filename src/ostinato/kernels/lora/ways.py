"""How adapters come into the products of a step with dozens of tokens or more: the ways that there are.

`JOINED` is what runs: measured beside `APART` and each way alone by `benchmarks/lora_layers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Ways(NamedTuple):
    """Whether a kernel that multiplies, or one behind it, does the work of kernels of adapters."""

    slots_are_columns: bool
    """`skinny` with a gate takes second matrices of few slots as more columns, and begins with them."""
    norm_adds: bool
    """What adapters add to a product that a norm reads runs beside it, and the norm adds it."""


APART = Ways(slots_are_columns=False, norm_adds=False)
JOINED = Ways(slots_are_columns=True, norm_adds=True)
NAMED = {
    "apart": APART,
    "joined": JOINED,
    **{name: APART._replace(**{name: True}) for name in Ways._fields},
}
DEFAULT = JOINED

_taken = [DEFAULT]


def ways() -> Ways:
    """Which are taken."""
    return _taken[-1]


@contextmanager
def taking(others: Ways) -> Iterator[None]:
    """Inside, these: for measurements and tests. Graphs keep the ways of their capture."""
    _taken.append(others)
    try:
        yield
    finally:
        _taken.pop()
