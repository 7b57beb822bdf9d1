"""Tiny models for scripts in vLLM's style: text with a template that shows tools, and heads that judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from .conftest import TINY, TinyModel

TEMPLATE = (
    "{% if tools %}{% for t in tools %}[{{ t['function']['name'] }}]{% endfor %}{% endif %}"
    "{% for m in messages %}<|turn|>{{ m['role'][0] }}:{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>a:{% endif %}"
)
LONG = {**TINY, "num_hidden_layers": 1, "max_position_embeddings": 1024}


def text_model(directory: Path) -> TinyModel:
    """A Llama that takes long prompts."""
    model = TinyModel(directory, "Llama", **LONG)
    write_text_tokenizer(directory)
    return model


def write_text_tokenizer(directory: Path) -> None:
    """What can be typed as tokens, blanks and ends of lines among them; 130 ends a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    before = pre_tokenizers.ByteLevel(add_prefix_space=False)
    typed = [before.pre_tokenize_str(chr(byte))[0][0] for byte in (10, *range(32, 127))]
    rest = [character for character in sorted(pre_tokenizers.ByteLevel.alphabet()) if character not in typed]
    tokenizer = Tokenizer(models.BPE({name: at for at, name in enumerate([*typed, *rest][:128])}, []))
    tokenizer.pre_tokenizer = before
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|begin|>", "<|turn|>", "<|end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "bos_token": "<|begin|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def judging_model(directory: Path, family: str, num_labels: int, **fields: Any) -> Any:
    """A `...ForSequenceClassification` of transformers, saved with a tokenizer."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        **{**LONG, "num_labels": num_labels, "head_dim": 8, "pad_token_id": 0, **fields}
    )
    torch.manual_seed(5)
    reference = getattr(transformers, f"{family}ForSequenceClassification")(config)
    reference.eval().requires_grad_(False)
    reference.save_pretrained(directory)
    write_text_tokenizer(directory)
    return reference


def judged(reference: Any, ids: list[int]) -> torch.Tensor:
    """The logits that transformers gives."""
    logits: torch.Tensor = reference(torch.tensor([ids])).logits[0]
    return logits
