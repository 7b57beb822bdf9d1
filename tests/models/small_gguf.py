"""Writes a transformers model as the GGUF file llama.cpp's converter would make of it."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ostinato.models.gguf_names import checkpoint_name
from text.small_tokenizers import gguf_metadata

_KIND = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_TENSORS = [
    *("token_embd.weight", "output_norm.weight", "output.weight"),
    *(
        f"blk.{{layer}}.{name}.{kind}"
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        for kind in ("weight", "bias")
    ),
    *(f"blk.{{layer}}.{name}.weight" for name in ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm")),
]


def write_gguf(
    model: Any,
    file: Path,
    *,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    extra: dict[str, np.ndarray] | None = None,
    drop: str | None = None,
    kind: str | None = None,
    pre: str = "gpt-2",
    more: dict[str, Any] | None = None,
) -> Path:
    """`extra` tensors and `more` metadata are added, the metadata field or tensor `drop` is left out."""
    config = model.config
    kind = kind or _KIND[config.model_type]
    writer = gguf.GGUFWriter(file, kind)
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim if hasattr(config, "head_dim") else 8,
    }
    for name, value in numbers.items():
        if name != drop:
            writer.add_uint32(f"{kind}.{name}", value)
    writer.add_float32(f"{kind}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{kind}.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_uint32(f"{kind}.vocab_size", config.vocab_size)
    tokenizer = gguf_metadata("byte-level") | {"tokenizer.ggml.pre": pre}
    for name, value in (tokenizer | (more or {})).items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    for pattern in _TENSORS:
        for layer in range(config.num_hidden_layers if "{layer}" in pattern else 1):
            name = pattern.format(layer=layer)
            theirs = checkpoint_name(name)
            if theirs not in weights or name == drop:
                continue
            array = weights[theirs]
            if kind == "llama" and ("attn_q." in name or "attn_k." in name):
                heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
                # Interleave the halves of each head, as llama.cpp's rotation wants them.
                halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
                array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
            stored = quantisation if array.ndim > 1 else gguf.GGMLQuantizationType.F32
            packed = gguf.quantize(array, stored)
            writer.add_tensor(name, packed, raw_dtype=stored)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
