"""Numbers from a `config.json`, each checked; errors name the field."""

import math
from collections.abc import Mapping
from typing import Any

from .errors import ModelError

LARGEST: Mapping[str, int] = {
    "num_hidden_layers": 4096,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "vocab_size": 2**24,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "max_position_embeddings": 2**31 - 1,
    "original_max_position_embeddings": 2**31 - 1,
    "sliding_window": 2**31 - 1,
    "num_labels": 2**20,
    "rms_norm_eps": 1,
    "rope_theta": 10**15,
    "factor": 2**20,
}
"""Far above any model there is: a file with more is damaged or hostile, and memory would be taken for it."""
LARGEST_OTHERS = 2**31 - 1


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
        raise ModelError(f"{field} must be a positive number, not {_shown(value)}")
    if value > (largest := LARGEST.get(field, LARGEST_OTHERS)) or math.isinf(value):
        raise ModelError(f"{field} must be a positive number up to {largest:,}, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
