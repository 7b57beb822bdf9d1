"""Which tokens may come next if a text is to stay within a grammar, as one bit each."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

Mask = np.ndarray[Any, np.dtype[np.int32]]
"""One bit per token id, the lowest first; set: allowed."""


def mask_words(vocab_size: int) -> int:
    """Number of 32-bit words in a mask."""
    return -(-vocab_size // 32)


class Grammar(Protocol):
    """The position of one text in its grammar."""

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next into a contiguous mask."""
