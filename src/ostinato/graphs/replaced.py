"""Something else in the place of an attribute, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """A context in which a module or class has the replacement under this name."""
    before = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, before)
