"""Adapters made up for a verification: in two slots, whose contents are restored at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ostinato.kernels.lora import NO_ADAPTER, LowRank
from ostinato.models.adapters.adapter import Adapter
from ostinato.models.adapters.reading import adaptable
from ostinato.models.adapters.stacks import AdapterStacks
from ostinato.models.transformer import Transformer

from .made_requests import MadeRequest

_SIZE = 0.1
"""Scale of what they add, relative to products of order one."""


class MadeAdapters:
    """Every third request has none, the others one of two; requests that share pages share the adapter."""

    def __init__(
        self,
        model: Transformer,
        stacks: AdapterStacks,
        max_rank: int,
        requests: Sequence[MadeRequest],
        seed: int,
    ) -> None:
        self._stacks = stacks
        used = sorted({0, stacks.num_slots - 1})
        generator = torch.Generator().manual_seed(seed)
        self._adapters = {
            slot: _random(model, max(1, max_rank - at), generator) for at, slot in enumerate(used)
        }
        cycle = (NO_ADAPTER, *used)
        self._slots = {
            id(request): cycle[1 if request.first_own else at % len(cycle)]
            for at, request in enumerate(requests)
        }

    def slot_of(self, request: MadeRequest) -> int:
        """The slot of a request's adapter, or NO_ADAPTER."""
        return self._slots[id(request)]

    def added(self, layer: str, x: Tensor, slots: Tensor) -> Tensor:
        """What they add to the product of a linear layer with x [T, in], float32 [T, out]; `slots` [T]."""
        found: Tensor | None = None
        for slot, adapter in self._adapters.items():
            ends = [_product(part, x) for part in adapter.layers[layer] if part is not None]
            own = torch.cat(ends, dim=1) * (slots == slot).unsqueeze(1)
            found = own if found is None else found + own
        assert found is not None
        return found

    @contextmanager
    def written(self) -> Iterator[None]:
        """Inside, the slots hold them."""
        kept: Mapping[str, Tensor] = self._stacks.named_tensors()
        slots = list(self._adapters)
        before = {name: tensor[slots].clone() for name, tensor in kept.items()}
        try:
            for slot, adapter in self._adapters.items():
                self._stacks.write(slot, adapter)
            yield
        finally:
            for name, tensor in kept.items():
                tensor[slots] = before[name]


def _product(part: LowRank, x: Tensor) -> Tensor:
    a, b = part.a.to(x.device).float(), part.b.to(x.device).float()
    return (x @ a.T) @ b.T


def _random(model: Transformer, rank: int, generator: torch.Generator) -> Adapter:
    layers = {}
    for name, linear in adaptable(model).items():
        weight, dtype = linear.weight, linear.weight.dtype
        parts = []
        for rows in linear.parts or (weight.size(0),):
            a = (
                torch.randn(rank, weight.size(1), generator=generator, dtype=torch.float32)
                * weight.size(1) ** -0.5
            )
            b = torch.randn(rows, rank, generator=generator, dtype=torch.float32) * _SIZE
            parts.append(LowRank(a.to(dtype), b.to(dtype)))
        layers[name] = tuple(parts)
    return Adapter(layers, rank, b"")
