"""Small heads with random weights as they are published, and what the papers say they compute."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from .small_models import SHAPE

Weights = dict[str, Tensor]
AUX_LAYERS = [0, 1, 2]
DRAFT_VOCAB = 40


def head_config(method: str, **changes: Any) -> dict[str, Any]:
    """A config.json for a target of `SHAPE`."""
    fields = {**SHAPE, "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    if method == "eagle":
        return {**fields, "architectures": ["LlamaForCausalLM"], **changes}
    more = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX_LAYERS},
    }
    return {**fields, **more, **changes}


def head_weights(method: str, seed: int = 5, *, fc_bias: bool = False) -> Weights:
    """Every tensor that a published head of that shape has."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, heads = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_attention_heads"]
    kv_width = hidden // heads * SHAPE["num_key_value_heads"]

    def random(*shape: int, scale: float = 0.2, mean: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale + mean

    is_eagle = method == "eagle"
    width = hidden if is_eagle else 2 * hidden
    layer = "layers.0" if is_eagle else "midlayer"
    weights = {
        f"{layer}.self_attn.q_proj.weight": random(hidden, width),
        f"{layer}.self_attn.k_proj.weight": random(kv_width, width),
        f"{layer}.self_attn.v_proj.weight": random(kv_width, width),
        f"{layer}.self_attn.o_proj.weight": random(hidden, hidden),
        f"{layer}.post_attention_layernorm.weight": random(hidden, mean=1),
        f"{layer}.mlp.gate_proj.weight": random(inner, hidden),
        f"{layer}.mlp.up_proj.weight": random(inner, hidden),
        f"{layer}.mlp.down_proj.weight": random(hidden, inner),
    }
    if is_eagle:
        weights["fc.weight"] = random(hidden, 2 * hidden)
    else:
        offsets = torch.randperm(SHAPE["vocab_size"], generator=generator)[:DRAFT_VOCAB].sort().values
        weights |= {
            "fc.weight": random(hidden, len(AUX_LAYERS) * hidden),
            "midlayer.hidden_norm.weight": random(hidden, mean=1),
            "midlayer.input_layernorm.weight": random(hidden, mean=1),
            "norm.weight": random(hidden, mean=1),
            "lm_head.weight": random(DRAFT_VOCAB, hidden),
            "d2t": offsets - torch.arange(DRAFT_VOCAB),
            "t2d": torch.zeros(SHAPE["vocab_size"], dtype=torch.bool).index_fill_(0, offsets, True),
        }
    if fc_bias:
        weights["fc.bias"] = random(hidden)
    return weights


def save_head(
    directory: Path, config: dict[str, Any], weights: Weights | None, *, pickled: bool = False
) -> Path:
    """As a folder that can be given as a draft."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if weights is not None and pickled:
        torch.save(weights, directory / "pytorch_model.bin")
    elif weights is not None:
        save_file(
            {name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors"
        )
    return directory


class PaperHead:
    """One head over a whole sequence, without a cache: plain formulas."""

    def __init__(self, method: str, weights: Weights, embed: Tensor, lm_head: Tensor) -> None:
        self.method, self.weights, self.embed, self.lm_head = method, weights, embed, lm_head
        self.layer = "layers.0" if method == "eagle" else "midlayer"

    def combined(self, features: Tensor) -> Tensor:
        if self.method == "eagle":
            return features
        return F.linear(features, self.weights["fc.weight"], self.weights.get("fc.bias"))

    def __call__(self, ids: Tensor, carried: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [T, draft vocabulary], and the next features."""
        embedded = self.embed[ids]
        if self.method == "eagle":
            x = F.linear(
                torch.cat([embedded, carried], -1), self.weights["fc.weight"], self.weights.get("fc.bias")
            )
            residual = x
        else:
            x = torch.cat(
                [self._norm(embedded, "input_layernorm"), self._norm(carried, "hidden_norm")], dim=-1
            )
            residual = carried
        h = residual + self._attention(x)
        normed = self._norm(h, "post_attention_layernorm")
        gate, up = (self._linear(normed, f"mlp.{name}_proj") for name in ("gate", "up"))
        h = h + self._linear(F.silu(gate) * up, "mlp.down_proj")
        if self.method == "eagle":
            return h @ self.lm_head.T, h
        normed = F.rms_norm(h, h.shape[-1:], self.weights["norm.weight"], 1e-5)
        return normed @ self.weights["lm_head.weight"].T, h

    def to_target(self, ids: Tensor) -> Tensor:
        return ids if self.method == "eagle" else ids + self.weights["d2t"][ids]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{self.layer}.{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{self.layer}.{name}.weight"], 1e-5)

    def _attention(self, x: Tensor) -> Tensor:
        heads, kv_heads = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
        q, k, v = (self._linear(x, f"self_attn.{name}_proj") for name in "qkv")
        dim = q.shape[1] // heads
        angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        cos, sin = (
            torch.cat([angles, angles], -1).cos()[:, None],
            torch.cat([angles, angles], -1).sin()[:, None],
        )

        def turned(heads: Tensor) -> Tensor:
            a, b = heads.chunk(2, dim=-1)
            return heads * cos + torch.cat([-b, a], -1) * sin

        q, k = turned(q.unflatten(1, (heads, dim))), turned(k.unflatten(1, (kv_heads, dim)))
        v = v.unflatten(1, (kv_heads, dim))
        mixed = F.scaled_dot_product_attention(
            *(each.transpose(0, 1) for each in (q, k, v)), is_causal=True, enable_gqa=True
        )
        return self._linear(mixed.transpose(0, 1).flatten(1), "self_attn.o_proj")
