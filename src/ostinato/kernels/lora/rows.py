"""Which adapter each token of a step has, and what all layers of the step need of that."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NO_ADAPTER = -1
"""In place of a slot."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Made once a step, inside its graph and before its first kernel, which is the lookup of embeddings:
    kernels of layers read it before they wait for one another (`dependent_launch`)."""

    slots: Tensor
    """int32 [T]: of each token, padded ones included; `NO_ADAPTER` for none."""

    @classmethod
    def of(cls, slots: Tensor, num_slots: int) -> Rows:
        """From the slot of every token, int32 [T], of so many that there are."""
        return cls(slots)
