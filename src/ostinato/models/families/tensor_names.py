"""The names of a model's weights in checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorNames:
    """Names in safetensors files, by the names of our modules."""

    top: Mapping[str, str]
    """Of modules outside of layers."""
    layers: str
    """What precedes the number of a layer."""
    in_layer: Mapping[str, tuple[str, ...]]
    """Of a layer's modules; a fused one has the names of its parts, in the order in which they lie in it."""

    def of(self, module: str) -> tuple[str, ...]:
        """All names of a module; its tensors add theirs (`.weight`, `.bias`)."""
        if module in self.top:
            return (self.top[module],)
        _, index, inside = module.split(".", 2)
        return tuple(f"{self.layers}.{index}.{name}" for name in self.in_layer[inside])


LIKE_LLAMA = TensorNames(
    top={
        "embed_tokens": "model.embed_tokens",
        "norm": "model.norm",
        "lm_head": "lm_head",
        "score": "score",
    },
    layers="model.layers",
    in_layer={
        "input_layernorm": ("input_layernorm",),
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "self_attn.q_norm": ("self_attn.q_norm",),
        "self_attn.k_norm": ("self_attn.k_norm",),
        "self_attn.o_proj": ("self_attn.o_proj",),
        "post_attention_layernorm": ("post_attention_layernorm",),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down_proj": ("mlp.down_proj",),
    },
)
