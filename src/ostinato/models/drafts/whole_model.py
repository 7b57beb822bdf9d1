"""A smaller model with the same vocabulary as a draft: it needs only tokens, no features."""

from __future__ import annotations

from torch import Tensor

from ..mixing import Attend
from ..transformer import Transformer
from .draft import Draft, DraftStates


class WholeModel(Draft):
    """Any model, run token by token."""

    name = "draft_model"
    slot_offset = 0
    feature_size = 0

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        self.shape = model.config
        self.vocab_size = model.config.vocab_size

    def combined(self, features: Tensor) -> Tensor:
        """As `Draft`."""
        raise AssertionError("a model of its own takes no features")

    def forward(
        self, input_ids: Tensor, carried: Tensor | None, positions: Tensor, attend: Attend
    ) -> DraftStates:
        """As `Draft`."""
        return DraftStates(self.model(input_ids, positions, attend), None)

    def remember(self, input_ids: Tensor, carried: Tensor | None, positions: Tensor, attend: Attend) -> None:
        """As `Draft`."""
        self.model(input_ids, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Draft`."""
        return self.model.logits(hidden)
