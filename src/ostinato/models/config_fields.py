"""Numbers from a `config.json`, each checked; errors name the field."""

from collections.abc import Mapping
from typing import Any

from .errors import ModelError


def positive_float(raw: Mapping[str, Any], field: str, default: float | None = None) -> float:
    """A number above 0."""
    return float(_number(raw, field, default))


def positive(raw: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """An integer above 0."""
    value = _number(raw, field, default)
    if value != int(value):
        raise ModelError(f"{field} must be a whole number, not {value!r}")
    return int(value)


def _number(raw: Mapping[str, Any], field: str, default: float | None) -> float:
    value = raw.get(field)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"{field} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"{field} must be a positive number, not {value!r}")
    return value
