"""EAGLE: a layer over a token and the target's last hidden state of the token before it.

`h = layer(fc([embed(token), feature]))`; h is the next feature, and the input of the target's output layer,
without a norm. The layer has no norm before its attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.kernels.linear import products

from ..layers import Linear
from ..mixing import Attend
from ..room import Room
from .draft import DraftStates
from .head import Head, HeadLayer, HeadShape
from .target_parts import TargetParts


class EagleHead(Head):
    """Weights are uninitialised."""

    name = "eagle"

    def __init__(self, shape: HeadShape, target: TargetParts, max_positions: int, room: Room) -> None:
        super().__init__(shape, target, max_positions, room)
        hidden = shape.layer.hidden_size
        self.feature_size = hidden
        self.fc = Linear(room.of("fc"), 2 * hidden, hidden, bias=shape.fc_bias, shard_dim=None)
        self.layer = HeadLayer(shape.layer, room.of("layer"), hidden)

    def combined(self, features: Tensor) -> Tensor:
        """As `Draft`: returned unchanged."""
        return features

    def forward(
        self, input_ids: Tensor, carried: Tensor | None, positions: Tensor, attend: Attend
    ) -> DraftStates:
        """As `Draft`."""
        x = self._joined(input_ids, carried)
        return self._behind_attention(x, self._stored(x, positions, attend), None)

    def remember(self, input_ids: Tensor, carried: Tensor | None, positions: Tensor, attend: Attend) -> None:
        """As `Draft`."""
        self._stored(self._joined(input_ids, carried), positions, attend)

    def _joined(self, input_ids: Tensor, carried: Tensor | None) -> Tensor:
        assert carried is not None
        both = torch.cat([self.embedded(input_ids), carried], dim=-1)
        return products.linear(both, self.fc.matrix, self.fc.bias)
