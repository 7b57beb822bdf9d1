"""Models with two sets of weights, adapters and drafts, and requests of every kind for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models.small_adapters import write_adapter
from ostinato.text.structured import StructuredOutputs

from .asked_alone import Alone, Weights
from .conftest import TinyModel, prompts_of, write_byte_tokenizer
from .lora_world import KINDS as ADAPTERS
from .speculating import walks

PLAIN: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "seed": 4},
    "filtered": {"temperature": 1.2, "seed": 2, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalised": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "penalised and drawn": {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.9},
    "biased": {"logit_bias": {5: 6.0, 9: 6.5, 40: -50.0}},
    "not too short": {"min_tokens": 5, "stop_token_ids": list(range(0, 48, 4))},
    "stopped by tokens": {"stop_token_ids": list(range(0, 60, 5)), "temperature": 1.0, "seed": 6},
    "with logprobs": {"logprobs": 3},
    "all numbers": {"logprobs": 2, "prompt_logprobs": 2, "temperature": 0.8, "seed": 1},
    "numbers of the prompt": {"prompt_logprobs": 0},
    "three": {"n": 3, "temperature": 1.0, "seed": 12},
    "two, penalised": {"n": 2, "temperature": 1.1, "seed": 3, "repetition_penalty": 1.3},
    "few allowed": {"allowed_token_ids": [3, 5, 7, 9, 11], "bad_words": [[5, 9], [7], [9, 5, 3]]},
    "no cached prefix": {"skip_reading_prefix_cache": True},
}
OF_TEXT: dict[str, dict[str, Any]] = {
    "stop strings": {"stop": ["e", "Q", "12"], "temperature": 1.0, "seed": 8},
    "stop strings, included": {"stop": ["a", "b", "%"], "include_stop_str_in_output": True, "min_tokens": 3},
    "digits": {"structured_outputs": StructuredOutputs(regex="[0-9]{1,9}")},
    "letters, drawn": {
        "structured_outputs": StructuredOutputs(regex="[a-f]{30}"),
        "temperature": 1.0,
        "seed": 5,
    },
}
_LENGTHS = (1, 3, 15, 16, 17, 33, 45)


@dataclass(repr=False)
class World:
    """All that requests can be about."""

    directory: str
    draft: str | None
    """Of a model or head that drafts."""
    weights: list[Weights]
    adapters: list[str]
    kinds: dict[str, dict[str, Any]]
    prompts: list[tuple[int, ...]]
    alone: Alone

    @classmethod
    def of_texts(cls, place: Path, family: str = "Llama", **fields: Any) -> World:
        """A model with a tokenizer, and a draft that is a little different."""
        model = TinyModel(place / "target", family, **fields)
        write_byte_tokenizer(place / "target")
        found = load_file(place / "target" / "model.safetensors")
        draft = place / "draft"
        draft.mkdir()
        (draft / "config.json").write_text((place / "target" / "config.json").read_text())
        save_file(_moved(found, 0.03), draft / "model.safetensors")
        return cls._made(place, found, model.reference, str(draft), {**PLAIN, **OF_TEXT}, 128)

    @classmethod
    def of_walks(cls, place: Path, method: str) -> World:
        """A model for heads that know it."""
        import transformers

        directory = walks.save_target(place / "target")
        draft = walks.save_draft(method, place / "draft")
        reference = transformers.LlamaForCausalLM.from_pretrained(directory).requires_grad_(False)
        found = load_file(place / "target" / "model.safetensors")
        return cls._made(place, found, reference, draft, PLAIN, walks.VOCAB)

    @classmethod
    def _made(cls, place: Path, found: Weights, reference: Any, draft: str, kinds: Any, vocab: int) -> World:
        other = _moved(found, 0.3)
        other["lm_head.weight"] = found["lm_head.weight"].roll(3, 0)
        adapters = []
        for number, kind in enumerate(ADAPTERS[:4]):
            write_adapter(place / f"adapter-{number}", reference, seed=number, **kind)
            adapters.append(str(place / f"adapter-{number}"))
        known = [tuple(prompt["prompt_token_ids"]) for prompt in prompts_of(_LENGTHS, 3, vocab)]
        # Pages in common, and a text that says the same again.
        prompts = [*known, (*known[-1][:32], 7), (*known[-1][:40], 1, 2), known[3] * 2 + known[3][:7]]
        weights, directory = [found, other], str(place / "target")
        return cls(directory, draft, weights, adapters, kinds, prompts, Alone(directory, weights, adapters))


def _moved(weights: Weights, by: float) -> Weights:
    generator = torch.Generator().manual_seed(1)
    return {
        name: tensor + by * tensor.std() * torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1
        else tensor.clone()
        for name, tensor in weights.items()
    }
