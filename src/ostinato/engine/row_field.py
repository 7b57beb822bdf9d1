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
    """Initial value of all rows; row 0 keeps it."""
    advances: bool = False
    """Whether graphs change it."""

    @property
    def cells(self) -> int:
        """32-bit cells per row."""
        return (self.width or 1) * self.dtype.itemsize // 4
