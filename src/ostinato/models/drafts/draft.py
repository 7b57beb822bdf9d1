"""What the engine needs of a draft, whatever model is inside.

It keeps its own keys and values, in pages with the same numbers as the target's. The entry for the token at
position p is in slot p - `slot_offset`: a head pairs a token with the target's feature of the token before,
so its first pair is in slot 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor, nn

from ..config import ModelConfig
from ..mixing import Attend


class DraftStates(NamedTuple):
    """The results of a draft for tokens."""

    hidden: Tensor
    """[T, H]: input of `Draft.logits`."""
    carried: Tensor | None
    """[T, H]: used as the feature of these tokens in the next step of a chain; None: nothing is carried."""


class Draft(nn.Module, ABC):
    """Computes scores of the next tokens from tokens and features of the target."""

    name: str
    """Name of the method."""
    shape: ModelConfig
    """Shape of its layers: how attention runs, and what is stored per token."""
    slot_offset: int
    """By how much a token's slot is less than its position."""
    feature_size: int
    """Size of the target's features per token; 0: it needs none."""
    tapped_layers: tuple[int, ...] = ()
    """Layers of the target before which features are taken; (): features are the last hidden states."""
    vocab_size: int
    """Number of tokens that it can propose."""

    @property
    def target_offsets(self) -> Tensor | None:
        """int64 [vocab_size]: added to the draft's token ids to get the target's; None: they are equal."""
        return None

    @abstractmethod
    def combined(self, features: Tensor) -> Tensor:
        """The target's features [T, feature_size] as input of a chain's first step: [T, H]."""

    @abstractmethod
    def forward(
        self, input_ids: Tensor, carried: Tensor | None, positions: Tensor, attend: Attend
    ) -> DraftStates:
        """Runs tokens int64 [T] with the features from `combined` or those carried by the previous step.

        `positions` int64 [T]: their slots.
        """

    @abstractmethod
    def remember(self, input_ids: Tensor, carried: Tensor | None, positions: Tensor, attend: Attend) -> None:
        """Only store keys and values of tokens, as `forward` would."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [T, vocab_size]."""
