"""Mistral: no biases, and the same window, if any, in every layer. GGUF files call it llama."""

from ..layer_kind import LayerKind
from .family import Family, RawConfig
from .windows import in_every_layer


def _layers(raw: RawConfig, num_layers: int) -> tuple[LayerKind, ...]:
    return tuple(LayerKind(window) for window in in_every_layer(raw, num_layers))


MISTRAL = Family("Mistral", _layers)
