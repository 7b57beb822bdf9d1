"""What a draft is to the engine, whichever model is inside.

It keeps keys and values of its own, in pages of the same numbers as those of the target. What stands for the
token at position p lies at slot p - `slot_offset`: a head pairs a token with the target's feature of the
token before, so that its first pair is at slot 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor, nn

from ..config import ModelConfig
from ..mixing import Attend


class DraftStates(NamedTuple):
    """What a draft makes of tokens."""

    hidden: Tensor
    """[T, H]: for `Draft.logits`."""
    carried: Tensor | None
    """[T, H]: what stands for the feature of these tokens in the next step of a chain; None: nothing does."""


class Draft(nn.Module, ABC):
    """Tokens, and features of the target, to scores of the tokens behind them."""

    name: str
    """Of the method."""
    shape: ModelConfig
    """Of its layers: how attention runs, and what is stored per token."""
    slot_offset: int
    """How far the slot of a token is before its position."""
    feature_size: int
    """Of the target, per token; 0: it needs none."""
    tapped_layers: tuple[int, ...] = ()
    """Before which layers of the target features are taken; (): they are its last hidden states."""
    vocab_size: int
    """Tokens that it can propose."""

    @property
    def target_offsets(self) -> Tensor | None:
        """int64 [vocab_size]: what is added to an id of its own to make it the target's; None: nothing is."""
        return None

    @abstractmethod
    def combined(self, features: Tensor) -> Tensor:
        """Features of the target [T, feature_size] as the first step of a chain takes them: [T, H]."""

    @abstractmethod
    def forward(
        self, input_ids: Tensor, carried: Tensor | None, positions: Tensor, attend: Attend
    ) -> DraftStates:
        """Tokens int64 [T] with what `combined` or the step before made of their features.

        `positions` int64 [T]: their slots.
        """

    @abstractmethod
    def remember(self, input_ids: Tensor, carried: Tensor | None, positions: Tensor, attend: Attend) -> None:
        """Only store keys and values of tokens, as `forward` would."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [T, vocab_size]."""
