"""Which rows of an output are real."""

from collections.abc import Sequence
from typing import Any

import torch

from .dispatching.descriptor import BatchDescriptor, BatchShape
from .inputs.fields import Extent

_PREFERENCE = (Extent.TOKEN, Extent.REQUEST, Extent.FIXED)


class Trimmer:
    """Learns from the rungs whether an output has rows per token, per request or neither.

    One rung can mislead (a feature dimension equal to the batch); all rungs together do not: an output is
    per token only if its size followed the number of tokens everywhere.
    """

    def __init__(self, dim: int = 0) -> None:
        """`dim`: where outputs count their rows."""
        self._dim = dim
        self._possible: dict[int, set[Extent]] = {}
        self._fixed_sizes: dict[int, int] = {}

    def observe(self, descriptor: BatchDescriptor, leaves: Sequence[Any]) -> None:
        """Take in the outputs of one rung."""
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                possible = self._possible.setdefault(position, set(Extent))
                possible &= self._consistent(position, leaf, descriptor)

    def extent(self, position: int) -> Extent:
        """What an output has rows for."""
        possible = self._possible[position]
        return next((extent for extent in _PREFERENCE if extent in possible), Extent.FIXED)

    def trim(self, position: int, leaf: torch.Tensor, shape: BatchShape) -> torch.Tensor:
        """The real rows of an output."""
        extent = self.extent(position)
        if extent is Extent.FIXED:
            return leaf
        rows = shape.num_tokens if extent is Extent.TOKEN else shape.num_reqs
        return leaf if rows == leaf.size(self._dim) else leaf.narrow(self._dim, 0, rows)

    def _consistent(self, position: int, leaf: torch.Tensor, descriptor: BatchDescriptor) -> set[Extent]:
        if leaf.dim() <= self._dim:
            return {Extent.FIXED}
        size = leaf.size(self._dim)
        consistent = set()
        if size == descriptor.num_tokens:
            consistent.add(Extent.TOKEN)
        if size == descriptor.num_reqs:
            consistent.add(Extent.REQUEST)
        if self._fixed_sizes.setdefault(position, size) == size:
            consistent.add(Extent.FIXED)
        return consistent
