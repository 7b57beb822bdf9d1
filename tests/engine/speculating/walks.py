"""Models whose next token follows from the last one alone, and drafts that are wrong where they should be.

Token t is a unit vector e_t, layers add nothing, and the output layer takes e_t to token f(t): a walk through
all tokens. A head that sees another vector for some tokens goes wrong there, and nowhere else.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, HIDDEN, INNER, LAYERS, HEADS = 61, 32, 16, 4, 4
HEAD_DIM = HIDDEN // HEADS
DRAFT_VOCAB = 40
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}
_SOME = torch.Generator().manual_seed(8)
VECTORS = torch.nn.functional.normalize(torch.randn(VOCAB, HIDDEN, generator=_SOME), dim=1)
# All have the same first component, by which EAGLE-3's attention knows a token's own place.
VECTORS[:, 0] = 0.3
VECTORS[:, 1:] *= math.sqrt(1 - 0.09) / VECTORS[:, 1:].norm(dim=1, keepdim=True)
_ORDER = torch.randperm(VOCAB, generator=_SOME)
NEXT = torch.empty(VOCAB, dtype=torch.int64).index_copy_(0, _ORDER, _ORDER.roll(-1))
"""f(t)."""
LOST = torch.arange(0, VOCAB, 4)
"""Tokens after which a draft goes wrong."""


def walk(start: int, count: int) -> list[int]:
    """So many tokens behind `start`."""
    tokens = [start]
    for _ in range(count):
        tokens.append(int(NEXT[tokens[-1]]))
    return tokens[1:]


def output_layer() -> Tensor:
    """Row f(t) is e_t."""
    return torch.empty(VOCAB, HIDDEN).index_copy_(0, NEXT, VECTORS)


def lost_vectors() -> Tensor:
    """The table of tokens, with those of others for some."""
    return VECTORS.index_copy(0, LOST, VECTORS[(LOST + 7) % VOCAB])


def _layer(name: str, width: int = HIDDEN) -> dict[str, Tensor]:
    attention = {
        f"self_attn.{part}_proj.weight": torch.randn(HIDDEN, width, generator=_SOME) for part in "qkv"
    }
    silent = {
        "self_attn.o_proj.weight": torch.zeros(HIDDEN, HIDDEN),
        "mlp.down_proj.weight": torch.zeros(HIDDEN, INNER),
    }
    inner = {
        f"mlp.{part}_proj.weight": torch.randn(INNER, HIDDEN, generator=_SOME) for part in ("gate", "up")
    }
    norms = {"post_attention_layernorm.weight": torch.ones(HIDDEN)}
    return {f"{name}.{part}": tensor for part, tensor in {**attention, **silent, **inner, **norms}.items()}


def save_target(directory: Path, vectors: Tensor = VECTORS, num_layers: int = LAYERS) -> str:
    """A whole model; with other vectors it is one that drafts."""
    tensors = {"model.embed_tokens.weight": vectors, "model.norm.weight": torch.ones(HIDDEN)}
    tensors["lm_head.weight"] = output_layer()
    for layer in range(num_layers):
        tensors |= _layer(f"model.layers.{layer}")
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(HIDDEN)
    return _save(directory, {**SHAPE, "num_hidden_layers": num_layers}, tensors)


def save_eagle(directory: Path) -> str:
    """A head that makes the target's feature of a token out of the token, by a table of its own."""
    whole = torch.cat([math.sqrt(HIDDEN) * torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)
    tensors = {"fc.weight": whole, "embed_tokens.weight": lost_vectors(), **_layer("layers.0")}
    return _save(directory, {**SHAPE, "num_hidden_layers": 1}, tensors)


def save_eagle3(directory: Path) -> str:
    """A head whose attention sees a token's own place, and brings its vector; it knows 40 tokens by their
    distances, and can propose no others."""
    both = 2 * HIDDEN
    place, vector = torch.zeros(HIDDEN, both), torch.zeros(HIDDEN, both)
    place[::HEAD_DIM, 0] = 1e3
    vector[:, :HIDDEN] = torch.eye(HIDDEN)
    kept = torch.randperm(VOCAB, generator=_SOME)[:DRAFT_VOCAB].sort().values
    tensors = {
        **_layer("midlayer", both),
        "midlayer.self_attn.q_proj.weight": place,
        "midlayer.self_attn.k_proj.weight": place.clone(),
        "midlayer.self_attn.v_proj.weight": vector,
        "midlayer.self_attn.o_proj.weight": 100 * torch.eye(HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "fc.weight": torch.randn(HIDDEN, 3 * HIDDEN, generator=_SOME),
        "lm_head.weight": output_layer()[kept],
        "d2t": kept - torch.arange(DRAFT_VOCAB),
    }
    config = {
        **SHAPE,
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    }
    return _save(directory, config, tensors, "LlamaForCausalLMEagle3")


def save_draft(method: str, directory: Path) -> str:
    """One for the walk, by method."""
    if method == "draft_model":
        return save_target(directory, lost_vectors(), num_layers=2)
    return save_eagle(directory) if method == "eagle" else save_eagle3(directory)


def _save(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    architecture: str = "LlamaForCausalLM",
) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    return str(directory)
