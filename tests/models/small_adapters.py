"""Small random adapters as PEFT saves them, and the models that they are meant to make of others."""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapter_tensors(
    reference: Any,
    *,
    seed: int,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    ranks: Mapping[str, int] | None = None,
    size: float = 0.4,
) -> dict[str, torch.Tensor]:
    """Matrices for the linear layers of a transformers model, by the names that PEFT gives them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in reference.named_modules():
        kind = name.rsplit(".", 1)[-1]
        if kind in targets:
            own = (ranks or {}).get(kind, rank)
            out, inner = module.weight.shape
            a, b = torch.randn(own, inner, generator=generator), torch.randn(out, own, generator=generator)
            tensors[f"base_model.model.{name}.lora_A.weight"] = a * size / math.sqrt(inner)
            tensors[f"base_model.model.{name}.lora_B.weight"] = b * size
    return tensors


def write_adapter(
    directory: Path,
    reference: Any,
    *,
    seed: int,
    rank: int = 4,
    targets: Sequence[str] = ALL,
    pickled: bool = False,
    **config: Any,
) -> Any:
    """An adapter in `directory`; the model that comes of merging it, computed here from PEFT's definition."""
    directory.mkdir(parents=True, exist_ok=True)
    ranks = config.get("rank_pattern", {})
    tensors = adapter_tensors(reference, seed=seed, rank=rank, targets=targets, ranks=ranks)
    fields = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
    } | config
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    if pickled:
        torch.save(tensors, directory / "adapter_model.bin")
    else:
        save_file(tensors, directory / "adapter_model.safetensors")
    return merged(reference, tensors, fields)


def merged(reference: Any, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Any:
    """`weight + scaling * B @ A` in every layer that has matrices."""
    model = copy.deepcopy(reference)
    for name, module in model.named_modules():
        a = tensors.get(f"base_model.model.{name}.lora_A.weight")
        if a is not None:
            b = tensors[f"base_model.model.{name}.lora_B.weight"]
            kind = name.rsplit(".", 1)[-1]
            alpha = config.get("alpha_pattern", {}).get(kind, config["lora_alpha"])
            rank = a.size(0)
            scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            module.weight += scaling * (b @ a)
    return model
