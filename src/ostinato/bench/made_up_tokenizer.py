"""A tokenizer for a model that has only a `config.json`, so that output processing has text to work on."""

from __future__ import annotations

import shutil
import string
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from .subject import Subject


@contextmanager
def with_text(subject: Subject) -> Iterator[tuple[Subject, str]]:
    """The subject with a tokenizer, and which one: its own, or one that spells token ids as words."""
    if (subject.directory / "tokenizer.json").is_file() or not subject.has_random_weights:
        yield subject, "the model's own"
        return
    with TemporaryDirectory() as name:
        folder = Path(name) / subject.name
        folder.mkdir()
        shutil.copy(subject.directory / "config.json", folder)
        _save_tokenizer(subject.shape.vocab_size, folder / "tokenizer.json")
        options = {**subject.options, "model": str(folder)}
        yield replace(subject, options=options, directory=folder), "made up: a word per token id"


def _save_tokenizer(vocab_size: int, file: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {_word(index): index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(file))


def _word(index: int) -> str:
    # U+0120 is the space of the byte-level alphabet; the letters are the index in base 26.
    letters, word = string.ascii_lowercase, "\u0120"
    while True:
        index, letter = divmod(index, len(letters))
        word += letters[letter]
        if not index:
            return word
