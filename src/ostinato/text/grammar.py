"""Which tokens may come next so that a text stays inside a grammar, one bit each."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

Mask = np.ndarray[Any, np.dtype[np.int32]]
"""One bit per token id, the lowest first; set: allowed."""


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask."""
    return -(-vocab_size // 32)


class Grammar(Protocol):
    """How far one text has got in its grammar."""

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next into a contiguous mask."""
