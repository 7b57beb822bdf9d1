"""Collects hidden states from inside a model: those before some of its layers, side by side."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Taps:
    """Copies the residual stream before given layers, for one step."""

    def __init__(self, layers: Sequence[int]) -> None:
        """`layers`: in the order in which their states are to lie side by side."""
        self.layers = tuple(layers)
        self._taken: Tensor | None = None

    def begin(self, stream: Tensor) -> None:
        """Allocate for a step, whose residual stream [T, H] begins like this."""
        num_tokens, width = stream.shape
        shape = num_tokens, len(self.layers), width
        self._taken = torch.empty(shape, dtype=stream.dtype, device=stream.device)

    def take(self, layer: int, stream: Tensor) -> None:
        """Copy the stream [T, H] before it changes."""
        assert self._taken is not None
        for place, wanted in enumerate(self.layers):
            if wanted == layer:
                self._taken[:, place].copy_(stream)

    def features(self) -> Tensor:
        """All collected states: [T, layers * H]."""
        assert self._taken is not None
        return self._taken.flatten(1)
