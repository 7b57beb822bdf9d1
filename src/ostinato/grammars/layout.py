"""The layout of the memory that the engine shares with a grammar's process, and of their packets.

A packet to the process is a list of int32: commands one after another, each [command, slot, count] followed
by `count` token ids. START begins a new text in a slot, with these tokens; ACCEPT continues with one token.
Both are answered, in order, with one int32: a verdict; with FOLLOWS, the slot's mask is in the shared memory.
FREE is not answered. A packet of verdicts begins with the number of earlier verdicts.

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
"""Words of the header: the slot being worked on, plus one; bytes of the specification, which lies after the
header until it has been read."""
NUM_SLOTS = 2048
PACKET_BYTES = 32_768
"""Approximate maximum size of a packet."""


class Command(IntEnum):
    """First word of a command."""

    START = 0
    ACCEPT = 1
    FREE = 2


class Verdict(IntEnum):
    """The answer to a token."""

    FOLLOWS = 0
    """The mask of what may come next has been written."""
    COMPLETE = 1
    """The text has ended."""
    REFUSED = 2
    """The token is not allowed here."""
    DEAD_END = 3
    """Nothing may come next, but the text has not ended."""


def _stride(words: int) -> int:
    """Words from one mask to the next, such that no two masks share a cache line."""
    return -(-words // 16) * 16


class SharedMemory:
    """The header and a mask for every slot; pages that were never written take no memory."""

    def __init__(self, descriptor: int, words: int) -> None:
        """Map the memory of `descriptor`."""
        stride = _stride(words)
        self._map = mmap.mmap(descriptor, self.size(words))
        self.header: Mask = np.frombuffer(self._map, dtype=np.int32, count=HEADER_BYTES // 4)
        slots = np.frombuffer(self._map, dtype=np.int32, offset=HEADER_BYTES, count=stride * NUM_SLOTS)
        self.masks: Mask = slots.reshape(NUM_SLOTS, stride)[:, :words]
        """int32 [slots, words]."""

    @staticmethod
    def size(words: int) -> int:
        """Size in bytes, for `ftruncate`."""
        return HEADER_BYTES + max(4 * _stride(words) * NUM_SLOTS, MAX_SPECIFICATION_BYTES)

    def write_specification(self, text: bytes) -> None:
        """Call before the process exists."""
        self._map[HEADER_BYTES : HEADER_BYTES + len(text)] = text
        self.header[LENGTH] = len(text)

    def read_specification(self) -> bytes:
        """The specification, as it was written."""
        return self._map[HEADER_BYTES : HEADER_BYTES + int(self.header[LENGTH])]
