"""Which cases of a table run in the fast command."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but_for(names: Iterable[str], *fast: str) -> list[Any]:
    """Returns all names for `parametrize`, marked as slow but for `fast`.

    Each case compiles its own kernels, which takes most of its time. The fast ones have each tile, form and
    size of a head at least once; the others combine them in other ways.
    """
    names = list(names)
    assert set(fast) <= set(names), set(fast) - set(names)
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]
