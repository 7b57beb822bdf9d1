"""Ostinato: record the GPU work of a model step once, replay it for every token."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The public names of `ostinato.graphs`, imported when first asked for: torch takes seconds to load."""
    from . import graphs

    if name in graphs.__all__:
        return getattr(graphs, name)
    raise AttributeError(f"module 'ostinato' has no attribute {name!r}")
