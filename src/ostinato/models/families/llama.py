"""Llama and models with its name, such as SmolLM2. Biases if `config.json` says so."""

from ..layer_kind import LayerKind
from .family import Family, RawConfig


def _layers(raw: RawConfig, num_layers: int) -> tuple[LayerKind, ...]:
    bias = bool(raw.get("attention_bias", False))
    kind = LayerKind(qkv_bias=bias, output_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False)))
    return (kind,) * num_layers


LLAMA = Family("Llama", _layers, gguf="llama", gguf_has_pairs_together=True)
