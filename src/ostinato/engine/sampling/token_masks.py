"""Which tokens each row may get, one bit each: on the device, with the host's copy of the same state.

Masks come from grammars, which are followed on the host, and from the lists of requests (`token_rules`); they
change with every token or not at all. The changed ones are sent in one copy from pinned memory, which nothing
waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ostinato.graphs import BatchShape, Field, InputBuffers
from ostinato.text.grammar import Grammar, Mask, mask_words

_ALL = -1
"""A word with all bits set: every token is allowed."""


class TokenMasks:
    """The masks of all rows; row 0, which belongs to padding, allows everything."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        words = mask_words(vocab_size)
        self._vocab_size = vocab_size
        self.tensor = torch.full((num_rows, words), _ALL, dtype=torch.int32, device=device)
        """int32 [num_rows, words], on the device."""
        self._mirror: Mask = np.full((num_rows, words), _ALL, dtype=np.int32)
        self._masked: set[int] = set()
        self._unsent: set[int] = set()
        self._buffers = InputBuffers(
            (Field("rows", torch.int64), Field("masks", torch.int32, (words,))),
            max_tokens=num_rows,
            device=device,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.tensor.nbytes + self._buffers.bytes

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Masks set inside are undone at the end."""
        tensor, mirror = self.tensor.clone(), self._mirror.copy()
        masked, unsent = set(self._masked), set(self._unsent)
        try:
            yield
        finally:
            self.tensor.copy_(tensor)
            self._mirror[:] = mirror
            self._masked, self._unsent = masked, unsent

    def follow(self, row: int, grammar: Grammar, within: Mask | None = None) -> bool:
        """Allow a row only the next tokens of a grammar that are also in `within`; on the device after the
        next `send`. False, and nothing changes, if there is none."""
        mask = np.empty_like(self._mirror[row])
        grammar.fill(mask)
        return self.allow(row, mask if within is None else mask & within)

    def allow(self, row: int, mask: Mask) -> bool:
        """Allow a row only these tokens; as `follow`."""
        if not mask.any():
            return False
        self._masked.add(row)
        self._set(row, mask)
        return True

    def allowed(self, row: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """bool, one per token: what the row may get, as the host knows it."""
        octets = self._mirror[row].view(np.uint8)
        return np.unpackbits(octets, bitorder="little", count=self._vocab_size).view(np.bool_)

    def allow_all(self, row: int) -> None:
        """Allow a row everything; on the device after the next `send`."""
        if row in self._masked:
            self._set(row, _ALL)
            self._masked.remove(row)

    def _set(self, row: int, mask: Mask | int) -> None:
        if not np.array_equal(self._mirror[row], np.broadcast_to(mask, self._mirror[row].shape)):
            self._unsent.add(row)  # before the mirror is written: if that fails, it is sent
            self._mirror[row] = mask

    def send(self) -> None:
        """Send changes to the device, after the steps launched so far; if it fails, the next call does."""
        if not self._unsent:
            return
        rows = np.array(sorted(self._unsent), dtype=np.int64)
        shape = BatchShape.decode(len(rows))
        descriptor = shape.as_descriptor()
        self._buffers.fill({"rows": rows, "masks": self._mirror[rows]}, shape, descriptor)
        sent = self._buffers.views(descriptor)
        self.tensor.index_copy_(0, sent["rows"], sent["masks"])
        self._unsent = set()
