"""What every running request has on the device where tokens are drafted."""

from __future__ import annotations

import torch

from ..resolved_config import ResolvedConfig
from ..row_field import RowField

LONGER = 0
"""Instead of the length of a context that only the device knows: what its row has, and the step's tokens."""
UNCHANGED = -1
"""The same, but the row stays as it is: acceptance decides by how much it grows."""

VERIFYING = "drafts"
"""Tells graphs that verify drafts from those of prompts, which may be smaller and end without acceptance."""


def drafting_fields(config: ResolvedConfig) -> tuple[RowField, ...]:
    """The fields of a row beside those that it has anyway."""
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
