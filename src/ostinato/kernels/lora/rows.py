"""Which adapter each token of a step has, and what all layers of the step need of that."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .division import num_blocks, tokens_together

NO_ADAPTER = -1
"""In place of a slot."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Made once a step, inside its graph and before its first kernel, which is the lookup of embeddings:
    kernels of layers read it before they wait for one another (`dependent_launch`)."""

    slots: Tensor
    """int32 [T]: of each token, padded ones included; `NO_ADAPTER` for none."""
    order: Tensor | None = None
    """int32 [T]: the tokens that have an adapter, by slot; on a GPU."""
    blocks: Tensor | None = None
    """int32 [5, blocks]: the slot of each block of tokens, where it begins and ends in `order`; on a GPU.

    `NO_ADAPTER`, 0 and 0 for a block that there is not. Then the slots that tokens have, each once, and
    `NO_ADAPTER` behind them. Last, a place to say that the tokens of a layer are complete (`shrink.cu`).
    """

    @classmethod
    def of(cls, slots: Tensor, num_slots: int) -> Rows:
        """From the slot of every token, int32 [T], of so many that there are."""
        return cls.in_blocks(slots, num_slots) if slots.is_cuda else cls(slots)

    @classmethod
    def in_blocks(cls, slots: Tensor, num_slots: int) -> Rows:
        """For kernels."""
        from .triton_grouping import group

        num_tokens = slots.size(0)
        return cls(
            slots, *group(slots, num_slots, tokens_together(num_tokens), num_blocks(num_tokens, num_slots))
        )
