"""What a step's inputs are: declared once, with what padding holds beside each."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import torch

from ..errors import ConfigError

Scalar: TypeAlias = int | float | bool


class Extent(StrEnum):
    """What a field has one row for."""

    TOKEN = "token"
    REQUEST = "request"
    FIXED = "fixed"


@dataclass(frozen=True)
class Field:
    """One input of a step: its type, its extent, and what its padded rows hold."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    """Shape of one row; for a fixed field the shape of the whole."""
    per: Extent | str = Extent.TOKEN
    """One row per token, per request, or a fixed size without padding."""
    pad: Scalar = 0
    """What padded rows hold. Must be legal for the step: a length of 1, the reserved page 0."""
    poison: Scalar | None = None
    """What padded rows hold in poison mode. By default a large finite number for floating types and the
    ordinary padding for integers, whose legal range only the owner of the field knows."""
    sample: tuple[int, int] | None = None
    """Range [low, high) that `verify` draws integers from; without it they are all padding."""
    dim: int = 0
    """Where the rows are counted."""
    each: int = 1
    """Rows for each token or request, those of one behind those of another."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ConfigError(f"a field's name must be a Python identifier, not {self.name!r}")
        if not isinstance(self.dtype, torch.dtype):
            raise ConfigError(f"field {self.name}: dtype must be a torch.dtype, not {self.dtype!r}")
        try:
            object.__setattr__(self, "per", Extent(self.per))
        except ValueError:
            names = ", ".join(extent.value for extent in Extent)
            raise ConfigError(f"field {self.name}: per must be one of {names}, not {self.per!r}") from None
        if self.each < 1:
            raise ConfigError(f"field {self.name}: each must be 1 or more, not {self.each}")
        if not 0 <= self.dim <= len(self.shape):
            raise ConfigError(f"field {self.name}: dim {self.dim} is outside a row of shape {self.shape}")

    @property
    def poison_value(self) -> Scalar:
        """What padded rows hold in poison mode."""
        if self.poison is not None:
            return self.poison
        if self.dtype.is_floating_point:
            return min(3.0e4, torch.finfo(self.dtype).max / 2)
        return self.pad

    def rows(self, num_tokens: int, num_reqs: int) -> int:
        """How many rows the field has at this size; 1 for a fixed field."""
        if self.per is Extent.FIXED:
            return 1
        return self.each * (num_tokens if self.per is Extent.TOKEN else num_reqs)

    def full_shape(self, num_tokens: int, num_reqs: int) -> tuple[int, ...]:
        """The field's whole shape at this size."""
        if self.per is Extent.FIXED:
            return self.shape
        rows = self.rows(num_tokens, num_reqs)
        return (*self.shape[: self.dim], rows, *self.shape[self.dim :])
