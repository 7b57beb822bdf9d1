"""What every running request has on the device when tokens are drafted."""

from __future__ import annotations

import torch

from ..resolved_config import ResolvedConfig
from ..row_field import RowField

LONGER = 0
"""In place of a context length that only the device knows: the row's length plus the step's tokens."""
UNCHANGED = -1
"""The same, but the row's length is not changed: acceptance decides how much it grows."""

VERIFYING = "drafts"
"""Marks graphs that verify drafts: those of prompts may be smaller, and end without acceptance."""


def drafting_fields(config: ResolvedConfig) -> tuple[RowField, ...]:
    """The fields of a row beyond those that it always has."""
    if config.speculation is None:
        return ()
    integer = torch.int32
    of_text = (RowField("history", integer, config.max_positions, advances=True),)
    of_features = (RowField("feature_base", integer, advances=True),)
    return (
        RowField("drafts", integer, config.max_drafts, advances=True),
        RowField("num_accepted", integer, advances=True),
        RowField("draft_limits", integer),
        RowField("asking_draft_limits", integer),
        *(of_text if config.speculation.method == "ngram" else of_features),
    )
