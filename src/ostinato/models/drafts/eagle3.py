"""EAGLE-3: a layer over a token and `fc` of the target's hidden states before three of its layers.

`h = layer([norm(embed(token)), norm(feature)])` added to the feature; h is the next feature, and its norm is
the input of `lm_head`. The output layer may have fewer tokens than the target: `d2t[i]` is the target's id of
its token i, minus i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.kernels.linear import products

from ..layers import Linear, RMSNorm
from ..mixing import Attend
from ..room import Room
from .draft import DraftStates
from .head import Head, HeadLayer, HeadShape
from .target_parts import TargetParts


class Eagle3Head(Head):
    """Weights are uninitialised; without `d2t`, draft tokens are the target's first ones."""

    name = "eagle3"
    d2t: Tensor
    input_norm: RMSNorm | None

    def __init__(self, shape: HeadShape, target: TargetParts, max_positions: int, room: Room) -> None:
        super().__init__(shape, target, max_positions, room)
        config = shape.layer
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.tapped_layers = shape.tapped_layers
        self.feature_size = hidden * len(shape.tapped_layers)
        self._norm_before_residual = shape.norm_before_residual
        self.input_norm = (
            RMSNorm(room.of("input_norm"), self.feature_size, eps) if shape.norm_before_fc else None
        )
        self.fc = Linear(room.of("fc"), self.feature_size, hidden, bias=shape.fc_bias, shard_dim=None)
        self.input_layernorm = RMSNorm(room.of("input_layernorm"), hidden, eps)
        self.hidden_norm = RMSNorm(room.of("hidden_norm"), hidden, eps)
        self.layer = HeadLayer(config, room.of("layer"), 2 * hidden)
        self.norm = RMSNorm(room.of("norm"), hidden, eps)
        offsets = torch.zeros(shape.draft_vocab, dtype=torch.int64, device=room.device)
        self.register_buffer("d2t", offsets, persistent=False)

    def combined(self, features: Tensor) -> Tensor:
        """As `Draft`."""
        features = features if self.input_norm is None else self.input_norm(features)
        return products.linear(features, self.fc.matrix, self.fc.bias)

    def forward(
        self, input_ids: Tensor, carried: Tensor | None, positions: Tensor, attend: Attend
    ) -> DraftStates:
        """As `Draft`."""
        both, normed = self._joined(input_ids, carried)
        assert carried is not None
        residual = normed if self._norm_before_residual else carried
        return self._behind_attention(residual, self._stored(both, positions, attend), self.norm)

    def remember(self, input_ids: Tensor, carried: Tensor | None, positions: Tensor, attend: Attend) -> None:
        """As `Draft`."""
        self._stored(self._joined(input_ids, carried)[0], positions, attend)

    @property
    def target_offsets(self) -> Tensor:
        """As `Draft`."""
        return self.d2t

    def _joined(self, input_ids: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor]:
        assert carried is not None
        normed = self.hidden_norm(carried)
        return torch.cat([self.input_layernorm(self.embedded(input_ids)), normed], dim=-1), normed
