"""How many bytes of text one token can stand for, so that a text is known to be too long by its size."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_COMPOSED = 3
"""NFC composes three characters of three bytes each into one of up to three bytes."""


def most_bytes_per_token(backend: Any) -> int | None:
    """The bound of a `tokenizers.Tokenizer`; None if a token can stand for any amount of text."""
    parts = [_state(getattr(backend, name)) for name in ("normalizer", "pre_tokenizer")]
    shrinking = [_shrinks_by(step) for part in parts for step in _steps(part)]
    model = _state(backend.model)
    kinds = {step.get("type") for step in _steps(parts[1])}
    knows_all_bytes = "ByteLevel" in kinds or bool(model.get("byte_fallback"))
    added = backend.get_added_tokens_decoder().values()
    absorbs = any(token.lstrip or token.rstrip for token in added)
    if backend.truncation is not None or absorbs or not knows_all_bytes or None in shrinking:
        return None
    named = {token.content for token in added}
    # In a byte-level vocabulary each character stands for a byte.
    length = len if "ByteLevel" in kinds else _encoded_length
    lengths = map(length, backend.get_vocab(with_added_tokens=False))
    longest = max((*lengths, *map(_encoded_length, named)))
    return longest * max((each for each in shrinking if each is not None), default=1)


def _encoded_length(token: str) -> int:
    return len(token.encode())


def _state(part: Any) -> Mapping[str, Any]:
    if part is None:
        return {}
    if not hasattr(part, "byte_fallback"):
        found: dict[str, Any] = json.loads(part.__getstate__())
        return found
    return {"byte_fallback": part.byte_fallback}  # a model's state is its whole vocabulary


def _steps(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    inner = part.get("normalizers") or part.get("pretokenizers")
    if inner is None:
        if part:
            yield part
        return
    for each in inner:
        yield from _steps(each)


def _shrinks_by(step: Mapping[str, Any]) -> int | None:
    """By which factor a step can shorten a text; None: by any factor, or unknown."""
    match step.get("type"):
        case "NFC":
            return _COMPOSED
        case "NFD" | "Prepend" | "ByteLevel" | "Metaspace" | "Digits" | "Punctuation":
            return 1
        case "Split":
            return None if step.get("behavior") == "Removed" else 1
        case "Replace":
            return 1 if step.get("pattern") == {"String": " "} and step.get("content") else None
    return None
