"""Norms and gates: work on rows one by one. See `rows`."""

import torch
from torch import Tensor

SQUARES_TOGETHER = 64
"""Columns of a row whose squares are added up: two for each lane of a warp of `wide.cu`, which has the same
number."""


def empty_scaled(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Allocates rows [T, H] times a weight, and their squares, float32 [H / 64, T]."""
    num_rows, width = rows.shape
    squares = rows.new_empty(width // SQUARES_TOGETHER, num_rows, dtype=torch.float32)
    return torch.empty_like(rows), squares
