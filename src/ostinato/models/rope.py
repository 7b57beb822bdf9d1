"""How positions become rotation angles, as a `config.json` says it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config_fields import positive, positive_float
from .errors import ModelError, UnsupportedModelError

SUPPORTED_ROPE = ("default", "linear", "llama3")
"""Values of `rope_type` that the engine computes."""


@dataclass(frozen=True)
class RopeConfig:
    """How positions become rotation angles."""

    theta: float = 10_000.0
    """Base of the wavelengths."""
    kind: str = "default"
    """One of `SUPPORTED_ROPE`."""
    factor: float = 1.0
    """How far `linear` and `llama3` stretch the context."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than original_max_positions / this are stretched in full."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than original_max_positions / this are left alone."""
    original_max_positions: int = 8192
    """llama3: the context length before stretching."""


def read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` beside `rope_scaling` (before)."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"rope_parameters must be an object, not {given!r}")
    kind = given.get("rope_type") or given.get("type") or "default"
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError("rope parameters that differ between layers are not supported")
    if kind not in SUPPORTED_ROPE:
        raise UnsupportedModelError(
            f"rope_type {kind!r} is not supported; supported are {', '.join(SUPPORTED_ROPE)}"
        )
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModelError(f"partial_rotary_factor {partial} is not supported; supported is 1.0")
    theta = positive_float(given, "rope_theta", raw.get("rope_theta") or 10_000.0)
    if kind == "default":
        return RopeConfig(theta)
    factor = positive_float(given, "factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low, high = positive_float(given, "low_freq_factor"), positive_float(given, "high_freq_factor")
    if low >= high:
        raise ModelError(f"rope low_freq_factor {low} must be less than high_freq_factor {high}")
    return RopeConfig(theta, kind, factor, low, high, positive(given, "original_max_position_embeddings"))
