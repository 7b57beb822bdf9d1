"""Random checkpoints in the shapes of known models, whole or scaled down, beside their reference."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .conftest import prompts_of
from .greedy_reference import exact_attention

_KNOWN = Path(__file__).parents[2] / "benchmarks" / "models"
_LLAMA_32_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_SCALED: dict[str, Any] = {
    "vocab_size": 1009,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    # Matrices of a sixteenth of the width need four times the deviation for activations of equal size.
    "initializer_range": 0.08,
}
SHAPES = ("qwen3-0.6b", "llama-3.2-1b")


def config_of(name: str, *, scaled: bool) -> dict[str, Any]:
    """The config.json of a known model, or a small relative that differs in sizes only."""
    file = _KNOWN / name / "config.json"
    known = json.loads(file.read_text()) if file.is_file() else {"llama-3.2-1b": _LLAMA_32_1B}[name]
    return {**known, **_SCALED} if scaled else known


SHARPNESS = 3.0
"""Deviation of attention scores. Under the usual initialisation it is below 1: a softmax of that is nearly
flat, and the outputs would hardly notice a wrong position or a lost page."""


@dataclass
class Checkpoint:
    """A random model of transformers, saved in bfloat16, so that every dtype starts from equal weights."""

    directory: Path
    device: torch.device
    reference: Any
    """The model in float32."""
    vocabulary: int
    _generated: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @classmethod
    def make(cls, directory: Path, config: dict[str, Any], device: torch.device) -> "Checkpoint":
        """Initialise as transformers does, sharpen attention, round to bfloat16, save."""
        import transformers

        (directory / "config.json").write_text(json.dumps(config))
        shape = transformers.AutoConfig.from_pretrained(directory)
        torch.manual_seed(17)
        with torch.device(device):
            model = getattr(transformers, config["architectures"][0])(shape)
        model = model.eval().requires_grad_(False)
        for layer in model.model.layers:
            attention = layer.self_attn
            if hasattr(attention, "q_norm"):
                attention.q_norm.weight *= SHARPNESS
            else:
                attention.q_proj.weight *= SHARPNESS / (shape.hidden_size * shape.initializer_range**2)
        _cast(model, torch.bfloat16)
        model.save_pretrained(directory)
        _cast(model, torch.float32)
        return cls(directory, device, model, config["vocab_size"])

    def prompts(self, lengths: Sequence[int], seed: int = 5) -> list[dict[str, list[int]]]:
        """Random prompts of these lengths."""
        return prompts_of(lengths, seed, self.vocabulary)

    @torch.no_grad()
    def generated(self, prompt: Sequence[int], count: int) -> list[int]:
        """What `generate` of transformers gives greedily."""
        known = self._generated.get(tuple(prompt))
        if known is None:
            ids = torch.tensor([list(prompt)], device=self.device)
            with exact_attention(self.device):
                out = self.reference.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=count,
                    do_sample=False,
                    eos_token_id=-1,
                    pad_token_id=0,
                )
            known = self._generated[tuple(prompt)] = out[0, len(prompt) :].tolist()
        return known

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Of every next token, by transformers in `dtype`, in float32 [len(ids), vocabulary]."""
        _cast(self.reference, dtype)
        kernels = exact_attention(self.device) if dtype is torch.float32 else nullcontext()
        try:
            with kernels:
                logits = self.reference(torch.tensor([list(ids)], device=self.device)).logits[0].float()
        finally:
            _cast(self.reference, torch.float32)  # exact: the weights are numbers of bfloat16
        return logits.log_softmax(-1)


def _cast(model: Any, dtype: torch.dtype) -> None:
    """The parameters alone: `model.to` would round the rotary frequencies as well, which loading does not."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
