"""Sampled tokens on their way to the host, and there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .request import IntArray


@dataclass(frozen=True)
class Sampled:
    """The tokens of a step, on the host; good until the slot they are in is used again."""

    tokens: IntArray
    """int64 [R]."""
    logprobs: IntArray | None = None
    """float32 [R, 1 + n]: of the sampled token, then of the n likeliest; None if nobody asked."""
    logprob_tokens: IntArray | None = None
    """int64 [R, 1 + n]: whose they are."""
    ranks: IntArray | None = None
    """int64 [R]: of the sampled tokens; 1 is the likeliest."""


class Launched:
    """A sampling step whose results are on their way."""

    def __init__(self, copies: Sequence[Tensor], done: torch.cuda.Event | None) -> None:
        self._copies = copies
        self._done = done

    def read(self) -> Sampled:
        """The tokens on the host; waits for the device."""
        if self._done is not None:
            self._done.synchronize()
        if len(self._copies) == 1:
            return Sampled(self._copies[0].numpy())
        tokens, chosen, ranks, top, top_tokens = self._copies
        logprobs = torch.cat([chosen[:, None], top], 1).numpy()
        logprob_tokens = torch.cat([tokens[:, None], top_tokens], 1).numpy()
        return Sampled(tokens.numpy(), logprobs, logprob_tokens, ranks.numpy())


class TokenReturn:
    """Pinned memory that results come back to, in slots used in turn.

    Outputs of a replay last until the next one, so their copy is queued at once, and nobody waits for it
    before the next step is launched.
    """

    def __init__(self, max_rows: int, num_slots: int, device: torch.device) -> None:
        """`num_slots`: one more than steps whose tokens are unread at any time."""
        self._max_rows = max_rows
        self._on_gpu = device.type == "cuda"
        self._slots: list[dict[int, Tensor]] = [{} for _ in range(num_slots)]
        self._views: dict[tuple[int, int, int], Tensor] = {}
        self._events = [torch.cuda.Event() for _ in range(num_slots)] if self._on_gpu else []
        self._next = 0

    def send(self, outputs: Sequence[Tensor]) -> Launched:
        """Begin to copy these outputs of a sampling graph, one row per request."""
        if not self._on_gpu:
            return Launched([output.clone() for output in outputs], None)
        slot = self._next
        self._next = (slot + 1) % len(self._slots)
        copies = [self._place(slot, number, output) for number, output in enumerate(outputs)]
        for copy, output in zip(copies, outputs, strict=True):
            copy.copy_(output, non_blocking=True)
        self._events[slot].record()
        return Launched(copies, self._events[slot])

    def _place(self, slot: int, number: int, like: Tensor) -> Tensor:
        rows = like.size(0)
        place = self._views.get((slot, number, rows))
        if place is None:
            whole = self._slots[slot].get(number)
            if whole is None:
                size = (self._max_rows, *like.shape[1:])
                whole = self._slots[slot][number] = torch.empty(size, dtype=like.dtype, pin_memory=True)
            place = self._views[slot, number, rows] = whole[:rows]
        return place
