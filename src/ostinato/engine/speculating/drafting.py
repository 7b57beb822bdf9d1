"""The contract of whoever drafts tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ostinato.graphs import BatchDescriptor, CudaGraphRunner
from ostinato.kernels.attention.batch import AttentionBatch

from ..scheduling.request import IntArray, Request


class Drafter(Protocol):
    """Writes `drafts` of rows from what is on the device, and from that alone."""

    graphs: CudaGraphRunner
    """What drafts; keys are uniform batches of as many tokens a request as there are drafts."""
    tapped_layers: tuple[int, ...]
    """Before which layers of the target features are taken; (): they are its last states."""

    def named_tensors(self) -> dict[str, Tensor]:
        """What the target's graphs read of it, beside rows."""
        ...

    def join(self, requests: Sequence[Request]) -> None:
        """Enter what newcomers need into their rows, before their first step; `rows.send` brings it there."""
        ...

    def run(self, rows: IntArray, num_drafts: int) -> None:
        """Launch so many drafts for each of these rows; the very same array while nothing changes."""
        ...

    def catch_up(self, rows: IntArray) -> None:
        """A step without drafts of these rows comes next: whoever of them had some verified in the step
        before it is to lack nothing of what that has accepted."""
        ...

    def note_step(
        self, input_ids: Tensor, batch: AttentionBatch, features: Tensor, descriptor: BatchDescriptor
    ) -> None:
        """Captured in every step of the target, behind its forward pass: keep what drafts will need of it.

        `features` [T, F]: the last states, or what was tapped. In a step that verifies drafts this comes
        before acceptance: `batch` has the length of all tokens, and `lengths` of its rows are as they were.
        """
        ...

    def try_out(self) -> None:
        """Run what has kernels of its own once, without a trace."""
        ...
