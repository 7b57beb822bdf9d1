"""Which adapter each token of a step has, and the adapters that the layers of a step are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .choice import num_blocks, tokens_together
from .stack import Stack

NO_ADAPTER = -1
"""In place of a slot."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The slots of a step's tokens, and the tokens grouped by slot.

    Made once a step, inside its graph and before its first kernel, which is the lookup of embeddings: kernels
    of layers read it before they wait for one another (`dependent_launch`).
    """

    slots: Tensor
    """int32 [T]: of each token, padded ones included; `NO_ADAPTER` for none."""
    order: Tensor | None = None
    """int32 [T]: the tokens that have an adapter, by slot; on a GPU."""
    blocks: Tensor | None = None
    """int32 [5, blocks], on a GPU: for each block of tokens of one slot

        row 0   its slot, `NO_ADAPTER` behind the last block
        row 1   where it begins in `order`, 0 behind the last block
        row 2   where it ends
        row 3   each slot that any token has, once, then `NO_ADAPTER`
        row 4   a flag that the tokens of the running layer are complete (`shrink.cu`)
    """

    @classmethod
    def of(cls, slots: Tensor, num_slots: int) -> Rows:
        """Groups tokens by their slots, int32 [T], of which there are so many; a CPU needs no groups."""
        return cls.in_blocks(slots, num_slots) if slots.is_cuda else cls(slots)

    @classmethod
    def in_blocks(cls, slots: Tensor, num_slots: int) -> Rows:
        """Groups tokens by their slots for kernels."""
        from .triton_grouping import group

        num_tokens = slots.size(0)
        return cls(
            slots, *group(slots, num_slots, tokens_together(num_tokens), num_blocks(num_tokens, num_slots))
        )


class Adapted(NamedTuple):
    """The adapters of one linear layer in a step."""

    stack: Stack
    rows: Rows


class Adapters(NamedTuple):
    """The stacks of a model and the rows of a step."""

    stacks: Mapping[str, Stack]
    """By the names of linear layers (`layers.0.self_attn.qkv_proj`); a layer that is not there has none."""
    rows: Rows

    def of(self, name: str) -> Adapted | None:
        """Returns the adapters of a linear layer; None if it has none."""
        stack = self.stacks.get(name)
        return None if stack is None else Adapted(stack, self.rows)


class ToShrink(NamedTuple):
    """The operands of a kernel that multiplies rows with `a` of their slots."""

    x: Tensor
    """[T, in]; rows may lie apart."""
    norm_weight: Tensor | None
    """What rows are multiplied with; None: nothing."""
    a: Tensor
    room: int
    """Ranks of a part."""
    ranks: Tensor
    order: Tensor
    blocks: Tensor


def adapted_by(adapters: Adapters | None, name: str) -> Adapted | None:
    """Returns the adapters of a linear layer in a step that may have none at all."""
    return None if adapters is None else adapters.of(name)
