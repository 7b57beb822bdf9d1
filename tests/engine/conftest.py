"""Tiny models on disk, with transformers' greedy answers to check against."""

import json
import signal
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "bos_token_id": None,
}


STEPS_AHEAD = (pytest.param(0, marks=pytest.mark.slow), 1)
"""For what does not depend on the order of steps: as users have it; the other way where all tests run."""


class TinyModel:
    """A random model of transformers, saved in a directory."""

    def __init__(self, directory: Path, family: str, **fields: Any) -> None:
        import transformers

        config = getattr(transformers, f"{family}Config")(**{**TINY, **fields})
        torch.manual_seed(11)
        reference = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
        reference.save_pretrained(directory)
        self._keep(directory, reference)

    @classmethod
    def saved(cls, directory: Path, reference: Any) -> "TinyModel":
        """One that is in `directory` already."""
        model = cls.__new__(cls)
        model._keep(directory, reference)
        return model

    def _keep(self, directory: Path, reference: Any) -> None:
        self.reference = reference
        self.directory = str(directory)
        self.greedy = lru_cache(maxsize=None)(self._greedy)

    def _greedy(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """The likeliest tokens one after another, each from a forward pass over everything before it."""
        ids = list(prompt)
        for _ in range(count):
            logits = self.reference(torch.tensor([ids])).logits[0, -1]
            best, second = logits.topk(2).values.tolist()
            assert best - second > 1e-4, "a tie: the reference proves nothing, choose another seed"
            ids.append(int(logits.argmax()))
        return ids[len(prompt) :]


def prompts_of(
    lengths: Sequence[int], seed: int = 5, vocabulary: int = TINY["vocab_size"]
) -> list[dict[str, list[int]]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {"prompt_token_ids": torch.randint(0, vocabulary, (length,), generator=generator).tolist()}
        for length in lengths
    ]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C does what it does in a terminal. Whatever a script starts in its background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The machine is shared, and tiny tensors gain nothing from a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A Llama without a tokenizer and without an end-of-sequence token."""
    return TinyModel(tmp_path_factory.mktemp("llama"), "Llama")


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The same with one layer, for tests of what an engine does with logits: its steps take two thirds."""
    return TinyModel(tmp_path_factory.mktemp("shallow"), "Llama", num_hidden_layers=1)


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A Llama with one layer and a byte tokenizer: token i is byte i, 130 ends a text."""
    directory = tmp_path_factory.mktemp("llama-text")
    model = TinyModel(directory, "Llama", num_hidden_layers=1)
    write_byte_tokenizer(directory)
    return model


def write_byte_tokenizer(directory: Path, characters: int = 128) -> None:
    """Characters of ASCII as tokens 0-127, two special ones and the end of a text behind them; or every byte,
    with 256 `characters`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet[:characters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|begin|>", "<|turn|>", "<|end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['content'] }}<|turn|>{% endfor %}"
    config = {"eos_token": "<|end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
