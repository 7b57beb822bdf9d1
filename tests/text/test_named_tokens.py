"""Tokens and habits that stand beside a vocabulary: prompts are those of transformers, whole."""

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.text.errors import TokenizerError
from ostinato.text.hf_like_tokenizer import HFLikeTokenizer
from ostinato.text.tokenizer import Tokenizer

from .small_tokenizers import byte_level, write_files

TEXT = "<s>the quick<|new|> brown fox<tool é>."
NEW = "<|new|>"


def fields(content: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": content, "special": special, **flags}


NAMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nowhere": ({}, {}),
    "added_tokens_decoder": ({"added_tokens_decoder": {"331": fields(NEW, special=False)}}, {}),
    "added_tokens_decoder, special": ({"added_tokens_decoder": {"331": fields(NEW, special=True)}}, {}),
    "in the order of numbers": (
        {"added_tokens_decoder": {"332": fields(NEW, special=True), "331": fields(" fox", special=False)}},
        {},
    ),
    "one that is there becomes special": (
        {"added_tokens_decoder": {"330": fields("<tool é>", special=True)}},
        {},
    ),
    "a role": ({"pad_token": NEW}, {}),
    "a role of its own": ({"image_token": NEW}, {}),
    "a role with fields": ({"eos_token": {"__type": "AddedToken", **fields(NEW, special=True)}}, {}),
    "extra_special_tokens": ({"extra_special_tokens": [" fox", NEW]}, {}),
    "extra_special_tokens by role": ({"extra_special_tokens": {"image_token": NEW}}, {}),
    "additional_special_tokens": (
        {"additional_special_tokens": [{"__type": "AddedToken", **fields(NEW, special=True)}]},
        {},
    ),
    "special_tokens_map": ({}, {"special_tokens_map.json": {"additional_special_tokens": [NEW]}}),
    "added_tokens": ({}, {"added_tokens.json": {NEW: 332, " fox": 331}}),
    "added_tokens, special": (
        {"additional_special_tokens": [NEW]},
        {"added_tokens.json": {NEW: 332, " fox": 331}},
    ),
}


@pytest.mark.parametrize("where", NAMED)
def test_tokens_that_files_name_are_those_of_transformers(where: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config, more = NAMED[where]
    # transformers 5 sees to the layout of a class that it knows; this one is left as its files are.
    files = {"tokenizer_config.json": {"tokenizer_class": "TokenizersBackend", **config}, **more}
    write_files({"tokenizer.json": byte_level().to_str()}, tmp_path)
    write_files({name: json.dumps(content) for name, content in files.items()}, tmp_path)
    expected, found = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_directory(tmp_path)
    ids = found.encode(TEXT)
    assert ids == expected(TEXT).input_ids
    assert (len(ids) < len(byte_level().encode(TEXT).ids)) == (
        where not in ("nowhere", "one that is there becomes special")
    )
    assert found.decode(ids) == expected.decode(ids, skip_special_tokens=True)
    assert found.vocab_size == len(expected)


def test_a_token_that_cannot_be_added_is_named(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"331": {"contents": NEW}}}
    files = {"tokenizer.json": byte_level().to_str(), "tokenizer_config.json": json.dumps(config)}
    with pytest.raises(TokenizerError, match=r"a token that its files name cannot be added.*content"):
        Tokenizer.from_directory(write_files(files, tmp_path))


@pytest.mark.parametrize("longest", [3, 4, 100])
def test_texts_that_a_script_has_cut_keep_what_stands_around_them(longest: int, tmp_path: Path) -> None:
    from tokenizers import processors
    from transformers import AutoTokenizer

    backend = byte_level().from_str(byte_level().to_str())
    around = [("<s>", 1), ("</s>", 2)]
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A $B </s>", around)
    config = {"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "eos_token": "</s>"}
    files = {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(config)}
    expected = AutoTokenizer.from_pretrained(write_files(files, tmp_path))
    tokenizer = Tokenizer.from_directory(tmp_path)
    found = HFLikeTokenizer(tokenizer, str(tmp_path), 1000)
    how = {"truncation": True, "max_length": longest}
    for texts in (("the quick brown fox",), ("the quick", "brown fox")):
        assert found.encode(*texts, **how) == expected.encode(*texts, **how)
    assert found(["the quick", "a"], **how).input_ids == expected(["the quick", "a"], **how).input_ids
    assert tokenizer.encode("the quick brown fox") == backend.encode("the quick brown fox").ids


def test_prompts_are_neither_cut_nor_filled_up(tmp_path: Path) -> None:
    """A tokenizer that was saved after training has in its file how batches were made."""
    backend = byte_level().from_str(byte_level().to_str())
    expected = {text: backend.encode(text).ids for text in ("the quick brown fox jumps", "a")}
    backend.enable_truncation(4)
    backend.enable_padding(length=8, pad_id=5)
    tokenizer = Tokenizer.from_directory(write_files({"tokenizer.json": backend.to_str()}, tmp_path))
    assert {text: tokenizer.encode(text) for text in expected} == expected
    assert (
        tokenizer.encode_pair("the quick", "brown fox") == byte_level().encode("the quick", "brown fox").ids
    )
