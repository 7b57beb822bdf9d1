"""Qwen3: heads are normalised; biases around attention if `config.json` says so."""

from ..layer_kind import LayerKind
from .family import Family, RawConfig
from .windows import on_request


def _layers(raw: RawConfig, num_layers: int) -> tuple[LayerKind, ...]:
    bias = bool(raw.get("attention_bias", False))
    return tuple(
        LayerKind(window, qkv_bias=bias, output_bias=bias, qk_norm=True)
        for window in on_request(raw, num_layers)
    )


QWEN3 = Family("Qwen3", _layers, default_head_dim=128, gguf="qwen3")
