"""Random adapters for a model's linear layers, in stacks and merged into weights."""

import torch
from torch import Tensor

from ostinato.kernels.lora import Adapters, LowRank, Rows, Stack
from ostinato.models.layers import Linear
from ostinato.models.transformer import Transformer


def attend_alone(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """No token sees another, so that each has the adapter of its own alone."""
    return q + (k + v).repeat_interleave(q.size(1) // k.size(1), dim=1)


class RandomAdapters:
    """Slot 0 changes every part of every layer, slot 1 the first part of each, slot 2 nothing."""

    def __init__(self, model: Transformer, *, size: float = 1.0, ranks: tuple[int, int] = (3, 17)) -> None:
        self.stacks: dict[str, Stack] = {}
        self._parts: dict[str, list[list[LowRank | None]]] = {}
        for name, linear in model.layers.named_modules():
            if not isinstance(linear, Linear):
                continue
            weight, parts = linear.weight, linear.parts or (linear.weight.size(0),)
            stack = Stack.empty(
                3, max(ranks), weight.size(1), parts, dtype=weight.dtype, device=weight.device
            )
            adapters: list[list[LowRank | None]] = [
                [self._low_rank(weight, rows, ranks[0], size) for rows in parts],
                [self._low_rank(weight, parts[0], ranks[1], size), *[None] * (len(parts) - 1)],
            ]
            for slot, adapter in enumerate(adapters):
                stack.put(slot, adapter)
            self.stacks[f"layers.{name}"] = stack
            self._parts[f"layers.{name}"] = adapters

    @staticmethod
    def _low_rank(weight: Tensor, rows: int, rank: int, size: float) -> LowRank:
        a = torch.randn(rank, weight.size(1), device=weight.device) / weight.size(1) ** 0.5
        b = torch.randn(rows, rank, device=weight.device) * size
        return LowRank(a.to(weight.dtype), b.to(weight.dtype), scaling=0.5)

    def for_tokens(self, slots: Tensor) -> Adapters:
        """For a step whose tokens have these slots."""
        return Adapters(self.stacks, Rows.of(slots, 3))

    def merge_into(self, model: Transformer, slot: int) -> None:
        """The same by other weights, in their precision."""
        for name, adapters in self._parts.items() if slot < 2 else ():
            linear = model.get_submodule(name)
            assert isinstance(linear, Linear)
            first = 0
            for part, rows in zip(adapters[slot], linear.parts or (linear.weight.size(0),), strict=True):
                if part is not None:
                    dtype = linear.weight.dtype
                    change = part.scaling * part.b.to(dtype) @ part.a.to(dtype)
                    linear.weight.data[first : first + rows] += change
                first += rows
