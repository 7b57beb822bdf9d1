"""A field that every request row has on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowField:
    """A named value, or list of values, that every row has."""

    name: str
    dtype: torch.dtype
    width: int | None = None
    """Values per row; None: a single one."""
    initial: float = 0
    """What all rows begin with, and row 0 keeps."""
    advances: bool = False
    """Whether graphs change it."""

    @property
    def cells(self) -> int:
        """32-bit cells per row."""
        return (self.width or 1) * self.dtype.itemsize // 4
