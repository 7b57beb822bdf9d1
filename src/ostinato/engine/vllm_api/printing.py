"""Small functions with which vLLM's examples print and log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from secrets import token_hex


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first numbers of a vector and its size."""
    shown = ", ".join(str(value) for value in embeds[:4])
    more = ", ..." if len(embeds) > 4 else ""
    print(f"{prefix}: [{shown}{more}] (size={len(embeds)})")


def random_uuid() -> str:
    """A random id for a request."""
    return token_hex(16)


def init_logger(name: str) -> logging.Logger:
    """A logger."""
    return logging.getLogger(name)
