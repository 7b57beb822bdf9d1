"""How positions become rotation angles, as specified by a `config.json`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config_fields import LARGEST_OTHERS, positive, positive_float
from .errors import ModelError, UnsupportedModelError

SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")
"""Supported values of `rope_type`."""


@dataclass(frozen=True)
class RopeConfig:
    """How positions become rotation angles."""

    theta: float = 10_000.0
    """Base of the wavelengths."""
    kind: str = "default"
    """One of `SUPPORTED_ROPE`."""
    factor: float = 1.0
    """By how much the context is stretched."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than original_max_positions / this are stretched fully."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than original_max_positions / this are not stretched."""
    original_max_positions: int = 8192
    """llama3, yarn: the context length before stretching."""
    beta_fast: float = 32.0
    """yarn: pairs that turn more often than this in the original context are not stretched."""
    beta_slow: float = 1.0
    """yarn: pairs that turn less often than this are stretched fully."""
    attention_factor: float = 1.0
    """yarn: factor for queries and keys."""


_NAMES = ("rope_parameters", "rope_scaling")
"""The names in transformers 5 and in earlier versions, which had `rope_theta` beside it."""


def with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` with `overrides`; overridden rope parameters replace those under either name.

    The base, `rope_theta`, stays unless they set it.
    """
    kept = dict(raw)
    if not overrides.keys().isdisjoint(_NAMES):
        kept["rope_theta"] = _base(raw)
        kept = {name: value for name, value in kept.items() if name not in _NAMES}
    if "rope_theta" in overrides:
        for name in _NAMES:
            if isinstance(given := kept.get(name), Mapping):
                kept[name] = {field: given[field] for field in given if field != "rope_theta"}
    return {**kept, **overrides}


def read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (earlier versions)."""
    found = [_read(raw, given) for name in _NAMES if (given := raw.get(name))]
    if found and found[0] != found[-1]:
        raise ModelError("rope_parameters and rope_scaling contradict each other: keep one of them")
    return found[0] if found else _read(raw, {})


def _base(raw: Mapping[str, Any]) -> Any:
    """`rope_theta`, wherever it is."""
    inside = [given.get("rope_theta") for name in _NAMES if isinstance(given := raw.get(name), Mapping)]
    return next((theta for theta in inside if theta is not None), None) or raw.get("rope_theta") or 10_000.0


def _read(raw: Mapping[str, Any], given: Any) -> RopeConfig:
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
    theta = positive_float(given, "rope_theta", _base(raw))
    if kind == "default":
        return RopeConfig(theta)
    factor = positive_float(given, "factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    if kind == "yarn":
        return _yarn(given, raw, theta, factor)
    low, high = positive_float(given, "low_freq_factor"), positive_float(given, "high_freq_factor")
    if low >= high:
        raise ModelError(f"rope low_freq_factor {low} must be less than high_freq_factor {high}")
    return RopeConfig(theta, kind, factor, low, high, positive(given, "original_max_position_embeddings"))


def longest_context(raw: Mapping[str, Any], rope: RopeConfig) -> int:
    """The number of positions after stretching, which a `config.json` includes in max_position_embeddings
    only for Llama 3's kind of stretching."""
    if rope.kind == "yarn":
        longest = rope.original_max_positions * rope.factor
    else:
        longest = positive(raw, "max_position_embeddings", 2048)
        longest *= rope.factor if rope.kind == "linear" else 1
    if not 1 <= longest <= LARGEST_OTHERS:
        raise ModelError(
            f"factor {rope.factor:g} of the rope parameters makes a context of {longest:g} positions: from "
            f"1 to {LARGEST_OTHERS:,} are possible"
        )
    return int(longest)


def _yarn(given: Mapping[str, Any], raw: Mapping[str, Any], theta: float, factor: float) -> RopeConfig:
    for field in ("mscale", "mscale_all_dim"):
        if given.get(field):
            raise UnsupportedModelError(f"yarn with {field} is not supported")
    if given.get("truncate") is False:
        raise UnsupportedModelError("yarn with truncate false is not supported")
    fast, slow = positive_float(given, "beta_fast", 32.0), positive_float(given, "beta_slow", 1.0)
    if slow >= fast:
        raise ModelError(f"rope beta_slow {slow} must be less than beta_fast {fast}")
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_positions=positive(
            given, "original_max_position_embeddings", positive(raw, "max_position_embeddings", 2048)
        ),
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=positive_float(given, "attention_factor", usual),
    )
