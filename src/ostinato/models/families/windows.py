"""Which layers see only the last positions."""

from collections.abc import Mapping
from typing import Any

from ..config_fields import positive
from ..errors import ModelError, UnsupportedModelError

Windows = tuple[int | None, ...]

_USUAL = 4096
"""The window that transformers uses if `config.json` does not mention one; null means none."""


def in_every_layer(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """`sliding_window`, unless it is null."""
    return (_window(raw),) * num_layers


def on_request(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """The same if `use_sliding_window` is set: in the layers that `layer_types` lists, or in those from
    `max_window_layers` on."""
    window = _window(raw) if raw.get("use_sliding_window") else None
    if window is None:
        return (None,) * num_layers
    types = raw.get("layer_types")
    if types is None:
        first = raw.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ModelError(f"max_window_layers must be a whole number of at least 0, not {str(first)[:60]}")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = ("sliding_attention", "full_attention")
    is_list = isinstance(types, list) and len(types) == num_layers
    if not is_list or not all(kind in known for kind in types):
        raise UnsupportedModelError(
            f"layer_types must name {num_layers} layers of sliding_attention or full_attention, "
            f"not {str(types)[:200]}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _window(raw: Mapping[str, Any]) -> int | None:
    is_none = raw.get("sliding_window", _USUAL) is None
    return None if is_none else positive(raw, "sliding_window", _USUAL)
