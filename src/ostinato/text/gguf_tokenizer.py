"""The tokenizer in a GGUF file's metadata, as the files of a Hugging Face directory."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import TokenizerError

_GPT2_LIKE = r"""[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_SPLITS = {
    "llama-bpe": _CONTRACTIONS + _GPT2_LIKE % r"\p{N}{1,3}",
    "qwen2": _CONTRACTIONS + _GPT2_LIKE % r"\p{N}",
}
SUPPORTED_PRE_TOKENIZERS = ("gpt-2", "smollm", *_SPLITS)
"""Values of `tokenizer.ggml.pre` that can be rebuilt, for byte-level BPE vocabularies."""

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Names and contents of `tokenizer.json` and `tokenizer_config.json` for a GGUF file's metadata."""
    from tokenizers import AddedToken

    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise TokenizerError("the GGUF file holds no tokenizer (tokenizer.ggml.tokens is missing)")
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(metadata, tokens)
    elif model == "llama":
        tokenizer = _sentencepiece(metadata, tokens)
    else:
        raise TokenizerError(f"GGUF tokenizer model {model!r} is not supported; supported are gpt2 and llama")
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        named = [token for token, its in zip(tokens, kinds, strict=False) if its == kind]
        add([AddedToken(token, normalized=False, special=kind == _CONTROL) for token in named])
    names = {
        f"{role}_token": tokens[int(metadata[field])]
        for role, field in _special_fields().items()
        if metadata.get(field) is not None
    }
    _add_ends(tokenizer, metadata, names)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    config["clean_up_tokenization_spaces"] = False
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(config, indent=1, ensure_ascii=False) + "\n",
    }


def _special_fields() -> dict[str, str]:
    longer = {"unk": "unknown", "pad": "padding"}
    return {
        role: f"tokenizer.ggml.{longer.get(role, role)}_token_id" for role in ("bos", "eos", "unk", "pad")
    }


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in SUPPORTED_PRE_TOKENIZERS:
        raise TokenizerError(
            f"GGUF pre-tokenizer {pre!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_PRE_TOKENIZERS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _SPLITS)
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores")
    if not scores:
        raise TokenizerError("the GGUF's llama tokenizer has no scores (tokenizer.ggml.scores is missing)")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [pair for _, pair in sorted(_merges(vocabulary, scores), key=lambda merge: merge[0])]
    unknown = tokens[int(metadata.get("tokenizer.ggml.unknown_token_id", 0))]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = [normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *spaces] if prefix else spaces)
    readable = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*readable, decoders.Strip(" ", 1, 0)] if prefix else readable)
    return tokenizer


def _merges(
    vocabulary: dict[str, int], scores: list[float]
) -> Iterator[tuple[tuple[float, int, int], tuple[str, str]]]:
    """Every way to join two tokens into a third, with its rank: the best-scored result first."""
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                yield (-scores[index], left, right), (token[:cut], token[cut:])


def _add_ends(tokenizer: Any, metadata: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Add the tokens before and after every text. If the file does not say which, as in llama.cpp."""
    from tokenizers import processors

    begins = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    before = names.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", begins) else None
    behind = names.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    added = [token for token in (before, behind) if token is not None]
    if not added:
        return
    single, second = (" ".join(filter(None, (before, text, behind))) for text in ("$A", "$B"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single} " + " ".join(f"{part}:1" for part in second.split()),
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(added)],
    )
