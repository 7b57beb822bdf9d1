"""Qwen2: queries, keys and values always have a bias."""

from ..layer_kind import LayerKind
from .family import Family, RawConfig
from .windows import on_request


def _layers(raw: RawConfig, num_layers: int) -> tuple[LayerKind, ...]:
    return tuple(LayerKind(window, qkv_bias=True) for window in on_request(raw, num_layers))


QWEN2 = Family("Qwen2", _layers, gguf="qwen2")
