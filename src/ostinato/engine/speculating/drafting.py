"""The contract of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ostinato.graphs import BatchDescriptor, CudaGraphRunner
from ostinato.kernels.attention.batch import AttentionBatch

from ..scheduling.request import IntArray, Request


class Drafter(Protocol):
    """Writes `drafts` of rows, from data on the device only."""

    graphs: CudaGraphRunner
    """The drafting graphs; keys are uniform batches with as many tokens per request as there are drafts."""
    tapped_layers: tuple[int, ...]
    """The target's features are taken before these layers; (): they are its last states."""

    def named_tensors(self) -> dict[str, Tensor]:
        """What the target's graphs read of it, beyond rows."""
        ...

    def join(self, requests: Sequence[Request]) -> None:
        """Write what newcomers need into their rows, before their first step; `rows.send` sends it."""
        ...

    def run(self, rows: IntArray, num_drafts: int) -> None:
        """Launch that many drafts for each of these rows. Pass the very same array while nothing changes."""
        ...

    def catch_up(self, rows: IntArray) -> None:
        """Called before a step of these rows without drafts: rows that had drafts verified in the step before
        must not miss anything of what it accepted."""
        ...

    def note_step(
        self, input_ids: Tensor, batch: AttentionBatch, features: Tensor, descriptor: BatchDescriptor
    ) -> None:
        """Captured in every step of the target, after its forward pass: keep what drafts will need of it.

        `features` [T, F]: the last states, or what was tapped. In a step that verifies drafts this runs
        before acceptance: `batch` has the lengths with all tokens, and `lengths` of its rows are still the
        old ones.
        """
        ...

    def try_out(self) -> None:
        """Run everything that has its own kernels once, without a trace."""
        ...
