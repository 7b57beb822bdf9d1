"""Declarations of a step's inputs, and of what padded rows hold in each."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import torch

from ..errors import ConfigError

Scalar: TypeAlias = int | float | bool


class Extent(StrEnum):
    """What a row of a field belongs to."""

    TOKEN = "token"
    REQUEST = "request"
    FIXED = "fixed"


@dataclass(frozen=True)
class Field:
    """One input of a step: its type, its extent and the value of padded rows."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    """Shape of one row; for a fixed field the whole shape."""
    per: Extent | str = Extent.TOKEN
    """One row per token, per request, or a fixed size without padding."""
    pad: Scalar = 0
    """The value of padded rows. It must be legal for the step: a length of 1, the reserved page 0."""
    poison: Scalar | None = None
    """The value of padded rows in poison mode. Default: a large finite number for floating types, and the
    ordinary padding for integers, whose legal range only the field's owner knows."""
    sample: tuple[int, int] | None = None
    """Range [low, high) from which `verify` draws integers; without it all integers are padding."""
    dim: int = 0
    """The dimension that counts the rows."""
    each: int = 1
    """Number of rows per token or request; rows of the same one are adjacent."""
    may_write: bool = True
    """Whether padded rows may write to the places that `pad` addresses, because nobody else uses them. Not if
    nobody chose `pad`."""

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
        """The value of padded rows in poison mode."""
        if self.poison is not None:
            return self.poison
        if self.dtype.is_floating_point:
            return min(3.0e4, torch.finfo(self.dtype).max / 2)
        return self.pad

    def rows(self, num_tokens: int, num_reqs: int) -> int:
        """Number of rows of the field at this size; 1 for a fixed field."""
        if self.per is Extent.FIXED:
            return 1
        return self.each * (num_tokens if self.per is Extent.TOKEN else num_reqs)

    def full_shape(self, num_tokens: int, num_reqs: int) -> tuple[int, ...]:
        """The field's whole shape at this size."""
        if self.per is Extent.FIXED:
            return self.shape
        rows = self.rows(num_tokens, num_reqs)
        return (*self.shape[: self.dim], rows, *self.shape[self.dim :])
