"""Which rows of an output are real."""

from collections.abc import Sequence
from typing import Any

import torch

from .dispatching.descriptor import BatchDescriptor, BatchShape
from .errors import CaptureError
from .inputs.fields import Extent

_PREFERENCE = (Extent.TOKEN, Extent.REQUEST, Extent.FIXED)


class Trimmer:
    """Learns whether an output has rows per token, per request or neither.

    One size can mislead (a feature dimension equal to the batch, as many requests as tokens); several do
    not. The runner shows it every rung, and, where that leaves a doubt, one batch of another shape.
    """

    def __init__(self, dim: int = 0) -> None:
        """`dim`: where outputs count their rows."""
        self._dim = dim
        self._possible: dict[int, set[Extent]] = {}
        self._fixed_sizes: dict[int, int] = {}
        self._sizes_seen: set[tuple[int, int]] = set()

    def observe(self, descriptor: BatchDescriptor, leaves: Sequence[Any]) -> None:
        """Take in the outputs at one size."""
        self._sizes_seen.add((descriptor.num_tokens, descriptor.num_reqs))
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                possible = self._possible.setdefault(position, set(Extent))
                possible &= self._consistent(position, leaf, descriptor)

    def in_doubt(self, *, tokens_are_requests: bool) -> bool:
        """Whether more than one reading of some output is left. Decode has a token for every request."""
        if len(self._sizes_seen) < 2:
            return bool(self._fixed_sizes)
        same = {Extent.TOKEN, Extent.REQUEST} if tokens_are_requests else set()
        return any(len(possible) > 1 and possible != same for possible in self._possible.values())

    def check(self) -> None:
        """CaptureError if the rows of an output follow nothing that is known."""
        for position, possible in self._possible.items():
            if not possible:
                raise CaptureError(
                    f"the rows of output {position} along dimension {self._dim} are neither one per token, "
                    f"nor one per request, nor always as many: padding cannot be cut off"
                )

    def extent(self, position: int) -> Extent:
        """What an output has rows for."""
        return next(extent for extent in _PREFERENCE if extent in self._possible[position])

    def trim(self, position: int, leaf: torch.Tensor, shape: BatchShape) -> torch.Tensor:
        """The real rows of an output, always as a tensor object of its own."""
        extent = self.extent(position)
        if extent is Extent.FIXED:
            return leaf.detach()
        rows = shape.num_tokens if extent is Extent.TOKEN else shape.num_reqs
        return leaf.narrow(self._dim, 0, rows)

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
