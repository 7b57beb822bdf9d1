"""GGUF's tensor names and metadata fields, as Hugging Face names and a `config.json`."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import ModelError, UnsupportedModelError
from .families import FAMILIES
from .layers import inverse_frequencies
from .rope import RopeConfig

SUPPORTED_GGUF = {family.gguf: family for family in FAMILIES if family.gguf is not None}
"""By GGUF's `general.architecture`. GGUF calls Mistral and SmolLM2 llama."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""Fields of `rope.scaling` and of `rope_parameters`."""
_CHANGES_NOTHING = {"attn_factor": 1, "yarn_attn_factor": 1, "yarn_ext_factor": 1, "yarn_log_multiplier": 0}
"""Fields that may be there besides, with these values only."""


def checkpoint_name(gguf_name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None if it has none."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", gguf_name)
    if found is None:
        return None
    layer, module, kind = found.groups()
    known = (_TOP if layer is None else _IN_LAYER).get(module)
    if known is None:
        return None
    return f"{known}.{kind}" if layer is None else f"model.layers.{layer}.{known}.{kind}"


def config_from_metadata(metadata: Mapping[str, Any], tensors: set[str]) -> dict[str, Any]:
    """The `config.json` of a GGUF file with these metadata and these tensors."""
    kind = metadata["general.architecture"]

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{kind}.{name}", default)
        if value is None:
            raise ModelError(f"GGUF metadata field {kind}.{name} is missing")
        return value

    heads, hidden = int(field("attention.head_count")), int(field("embedding_length"))
    head_dim = int(field("attention.key_length", hidden // heads))
    if (rotated := int(field("rope.dimension_count", head_dim))) != head_dim:
        raise UnsupportedModelError(f"rotating {rotated} of {head_dim} head dimensions is not supported")
    rope = {"rope_theta": float(field("rope.freq_base", 10_000.0)), **_rope_scaling(metadata, kind)}
    return {
        "architectures": [SUPPORTED_GGUF[kind].architectures[0]],
        "model_type": kind,
        "vocab_size": int(field("vocab_size", len(metadata.get("tokenizer.ggml.tokens", [])))),
        "hidden_size": hidden,
        "intermediate_size": int(field("feed_forward_length")),
        "num_hidden_layers": int(field("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(field("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(field("context_length")),
        "rms_norm_eps": float(field("attention.layer_norm_rms_epsilon")),
        "rope_parameters": rope,
        "hidden_act": "silu",
        "is_causal": bool(field("attention.causal", True)),
        "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "num_experts": int(field("expert_count", 0)),
        "tie_word_embeddings": "output.weight" not in tensors,
        # Weights are stored in fp16 for its precision; such models are made to compute in bf16.
        "dtype": "bfloat16",
    }


def _rope_scaling(metadata: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """How positions are stretched, in the names of a `config.json`; unknown fields are refused."""
    prefix = f"{kind}.rope.scaling."
    given = {name.removeprefix(prefix): it for name, it in metadata.items() if name.startswith(prefix)}
    scaling = given.pop("type", "none")
    if scaling == "none":
        return {"rope_type": "default"}
    changing = {name: value for name, value in given.items() if value != _CHANGES_NOTHING.get(name)}
    for name in changing.keys() - _SCALING.keys() - {"finetuned"}:
        message = f"GGUF metadata field {prefix}{name}={changing[name]} is not supported"
        raise UnsupportedModelError(message)
    return {
        "rope_type": scaling,
        **{theirs: given[name] for name, theirs in _SCALING.items() if name in given},
    }


def llama3_rope(config: Mapping[str, Any], factors: Tensor) -> dict[str, Any]:
    """Rope parameters from the per-frequency factors that GGUF stores instead.

    The published Llama 3 models differ only in `factor`, which is the largest of the factors; the other
    factors must follow from it, which is checked.
    """
    theta, head_dim = config["rope_parameters"]["rope_theta"], config["head_dim"]
    rope = RopeConfig(theta, "llama3", float(factors.max()))
    expected = inverse_frequencies(RopeConfig(theta), head_dim) / inverse_frequencies(rope, head_dim)
    if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModelError("rope_freqs other than those of Llama 3 models are not supported")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_positions,
    }
