"""An adapter on the host: two matrices for every layer that it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ostinato.kernels.lora import LowRank

Parts = tuple[LowRank | None, ...]
"""For a linear layer, in the order in which checkpoint layers lie in it; None: unchanged."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """In the dtype of its model; in pinned memory if the model is on a GPU."""

    layers: Mapping[str, Parts]
    """By the name of the linear layer (`layers.0.self_attn.qkv_proj`); only layers that it changes."""
    rank: int
    """The largest rank of its layers."""
    digest: bytes
    """Equal for adapters that compute the same."""

    @property
    def num_bytes(self) -> int:
        """Bytes on the host."""
        matrices = [each for parts in self.layers.values() for each in parts if each is not None]
        return sum(each.a.nbytes + each.b.nbytes for each in matrices)
