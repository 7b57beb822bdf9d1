"""Which layers see only the last positions."""

from collections.abc import Mapping
from typing import Any

from ..config_fields import positive
from ..errors import UnsupportedModelError

Windows = tuple[int | None, ...]


def in_every_layer(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """`sliding_window`, where it is set."""
    window = None if raw.get("sliding_window") is None else positive(raw, "sliding_window")
    return (window,) * num_layers


def on_request(raw: Mapping[str, Any], num_layers: int) -> Windows:
    """The same where `use_sliding_window` asks for it: in the layers that `layer_types` lists, or in those
    from `max_window_layers` on."""
    if not raw.get("use_sliding_window") or raw.get("sliding_window") is None:
        return (None,) * num_layers
    window = positive(raw, "sliding_window")
    types = raw.get("layer_types")
    if types is None:
        first = int(raw.get("max_window_layers", 28))
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(types) != num_layers or not set(types) <= {"sliding_attention", "full_attention"}:
        raise UnsupportedModelError(
            f"layer_types must name {num_layers} layers of sliding_attention or full_attention, not {types}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
