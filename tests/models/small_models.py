"""Tiny random models of each family, as transformers saves them, and a dense attention to run ours with."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ostinato.models.mixing import Attend
from ostinato.models.transformer import Transformer

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}},
    ),
    "yarn-rope": (
        "Qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1000.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"sliding_window": 5}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-biases-tied": (
        "Qwen3",
        {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
}


def reference_model(family: str, **overrides: Any) -> Any:
    """A transformers model with every weight random, norms and biases too."""
    import transformers

    name, fields = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SHAPE, **fields, **overrides})
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.3)
    return model


def saved_model(family: str, directory: Path, max_shard_size: str = "1GB", **overrides: Any) -> Any:
    """`reference_model`, also written to `directory`."""
    model = reference_model(family, **overrides)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def dense_attend(model: Transformer) -> Attend:
    """Causal attention within the tokens of one call."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = torch.arange(q.shape[0])[:, None] - torch.arange(q.shape[0])
        visible = distance >= 0
        if (window := model.config.layer_windows[layer]) is not None:
            visible &= distance < window
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("thd,shd->hts", q, k) * model.config.attention_scale
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1, dtype=torch.float32)
        return torch.einsum("hts,shd->thd", weights.to(v.dtype), v)

    return attend


def all_logits(model: Transformer, ids: Tensor) -> Tensor:
    """Logits after every one of `ids` [T]."""
    with torch.no_grad():
        return model.logits(model(ids, torch.arange(len(ids)), dense_attend(model)))
