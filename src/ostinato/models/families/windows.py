"""Which layers see only the last positions."""

from collections.abc import Mapping
from typing import Any

from ..config_fields import positive
from ..errors import UnsupportedModelError

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
        first = int(raw.get("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(types) != num_layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise UnsupportedModelError(
            f"layer_types must name {num_layers} layers of sliding_attention or full_attention, not {types}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _window(raw: Mapping[str, Any]) -> int | None:
    is_none = raw.get("sliding_window", _USUAL) is None
    return None if is_none else positive(raw, "sliding_window", _USUAL)
