"""The adapters of a model on its device: slots at fixed addresses, which captured graphs read."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.kernels.allocation import Allocate
from ostinato.kernels.lora import Adapters, LowRank, Rows, Stack

from ..transformer import Transformer
from .adapter import Adapter
from .reading import adaptable


class AdapterStacks:
    """A number of slots for every linear layer."""

    def __init__(
        self, model: Transformer, num_slots: int, max_rank: int, allocate: Allocate | None = None
    ) -> None:
        weight = model.embed_tokens.weight
        self.num_slots = num_slots
        self._stacks = {
            name: Stack.empty(
                num_slots,
                max_rank,
                linear.weight.size(1),
                linear.parts or (linear.weight.size(0),),
                dtype=weight.dtype,
                device=weight.device,
                allocate=allocate,
                name=name,
            )
            for name, linear in adaptable(model).items()
        }
        self._device = weight.device

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(stack.nbytes for stack in self._stacks.values())

    def named_tensors(self) -> dict[str, Tensor]:
        """The tensors that graphs read."""
        return {
            f"{name}.lora_{part}": tensor
            for name, stack in self._stacks.items()
            for part, tensor in (("a", stack.a), ("b", stack.b), ("ranks", stack.ranks))
        }

    def of_tokens(self, slots: Tensor) -> Adapters:
        """The adapters of a step whose tokens have these slots, int32 [T]."""
        return Adapters(self._stacks, Rows.of(slots, self.num_slots))

    @torch.no_grad()
    def write(self, slot: int, adapter: Adapter) -> None:
        """Put this adapter into a slot, in stream order: after everything launched before."""
        for name, stack in self._stacks.items():
            parts = adapter.layers.get(name)
            if parts is None:
                stack.clear(slot)
            else:
                stack.put(slot, [None if part is None else self._placed(part) for part in parts])

    @torch.no_grad()
    def clear(self) -> None:
        """Empty all slots."""
        for stack in self._stacks.values():
            for slot in range(self.num_slots):
                stack.clear(slot)

    def _placed(self, part: LowRank) -> LowRank:
        """Copy to the device without waiting."""
        a, b = (matrix.to(self._device, non_blocking=True) for matrix in (part.a, part.b))
        return LowRank(a, b, part.scaling)
