"""Tokenizers small enough to build in a test, in the two shapes the supported models use."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from ostinato.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over 12 lazy dogs.",
    "héllo wörld, naïve café",
    "日本語 русский 👩‍👩‍👧 🙂",
] * 3
SPECIAL = ["<unk>", "<s>", "</s>"]


@cache
def byte_level() -> Backend:
    """As GPT-2, Llama 3 and Qwen: every byte has a token."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<tool é>", special=False, normalized=False)])
    return backend


@cache
def sentencepiece_like() -> Backend:
    """As Llama 2 and Mistral: words begin with a space mark, rare characters fall back to byte tokens."""
    trained = Backend(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIAL + fallback, limit_alphabet=40, show_progress=False
    )
    trained.train_from_iterator([text for text in CORPUS if text.isascii()], trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    backend = Backend(
        models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = trained.normalizer
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


KINDS = {"byte-level": byte_level, "sentencepiece": sentencepiece_like}


@cache
def small_tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind](), special_tokens={"eos_token": "</s>"}, eos_token_ids=[2], templates={})


def gguf_metadata(kind: str) -> dict[str, Any]:
    """The tokenizer part of a GGUF file's metadata for one of the tokenizers above."""
    backend = KINDS[kind]()
    model = json.loads(backend.to_str())["model"]
    added = backend.get_added_tokens_decoder()
    tokens = [backend.id_to_token(index) for index in range(backend.get_vocab_size())]
    types = [1 if index not in added else 3 if added[index].special else 4 for index in range(len(tokens))]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if kind == "byte-level":
        merges = [" ".join(merge) for merge in model["merges"]]
        return metadata | {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.merges": merges,
        }
    ranks = {"".join(merge): -float(rank) for rank, merge in enumerate(model["merges"])}
    scores = [ranks.get(token, -1e6) for token in tokens]
    return metadata | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": scores}


def write_files(files: dict[str, str], directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_text(content)
    return directory
