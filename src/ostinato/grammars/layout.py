"""What lies where in the memory that the engine shares with the process of a grammar, and what they send.

A packet to the process is a list of int32: commands one after another, each [command, slot, count] with
`count` token ids behind it. START makes a new text in a slot, with these tokens in it; ACCEPT goes on with
one. Each of the two is answered, in order, with one int32: a verdict; with FOLLOWS the mask of the slot is in
the shared memory. FREE is not answered. A packet of verdicts begins with the number of those before it.

The first packet from the process is the outcome of compiling: a JSON object with `error` or `bytes`.
"""

from __future__ import annotations

import mmap
from enum import IntEnum

import numpy as np

from ostinato.text.grammar import Mask

from .limits import MAX_SPECIFICATION_BYTES

HEADER_BYTES = 4096
CURRENT, LENGTH = 0, 1
"""Words of the header: the slot being worked on, plus one; bytes of the specification, which lies behind the
header until it has been read."""
NUM_SLOTS = 2048
PACKET_BYTES = 32_768
"""A packet has at most about so many."""


class Command(IntEnum):
    """First word of a command."""

    START = 0
    ACCEPT = 1
    FREE = 2


class Verdict(IntEnum):
    """What came of a token."""

    FOLLOWS = 0
    """The mask of what may come next is there."""
    COMPLETE = 1
    """The text has ended."""
    REFUSED = 2
    """The token is not allowed here."""
    DEAD_END = 3
    """Nothing may come next, and the text has not ended."""


def _stride(words: int) -> int:
    """Words from one mask to the next: no two of them in one cache line."""
    return -(-words // 16) * 16


class SharedMemory:
    """The header and a mask for every slot; pages that nobody has written take no memory."""

    def __init__(self, descriptor: int, words: int) -> None:
        """Map what `descriptor` refers to."""
        stride = _stride(words)
        self._map = mmap.mmap(descriptor, self.size(words))
        self.header: Mask = np.frombuffer(self._map, dtype=np.int32, count=HEADER_BYTES // 4)
        slots = np.frombuffer(self._map, dtype=np.int32, offset=HEADER_BYTES, count=stride * NUM_SLOTS)
        self.masks: Mask = slots.reshape(NUM_SLOTS, stride)[:, :words]
        """int32 [slots, words]."""

    @staticmethod
    def size(words: int) -> int:
        """Bytes, as `ftruncate` wants them."""
        return HEADER_BYTES + max(4 * _stride(words) * NUM_SLOTS, MAX_SPECIFICATION_BYTES)

    def write_specification(self, text: bytes) -> None:
        """Before the process is there."""
        self._map[HEADER_BYTES : HEADER_BYTES + len(text)] = text
        self.header[LENGTH] = len(text)

    def read_specification(self) -> bytes:
        """As it was written."""
        return self._map[HEADER_BYTES : HEADER_BYTES + int(self.header[LENGTH])]
