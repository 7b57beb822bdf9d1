"""The bytes that each token id stands for: text is streamed as bytes, so no character is ever split."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from .errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class TokenBytes(dict[int, bytes]):
    """Bytes by token id, computed on first access; an id outside the vocabulary has none."""

    def __init__(self, decoder: Mapping[str, Any], id_to_token: Callable[[int], str | None]) -> None:
        """`decoder` as in a `tokenizer.json`: byte-level (GPT-2, Llama 3, Qwen) or sentencepiece-like."""
        super().__init__()
        self._id_to_token = id_to_token
        steps = {step.get("type"): step for step in decoder.get("decoders", [decoder])}
        self.strip_first_space = False
        """Whether a text loses one space at its start."""
        if "ByteLevel" in steps:
            self._convert = _byte_level
        elif steps.keys() & {"ByteFallback", "Metaspace"}:
            self._convert = _sentencepiece
            prepended = steps.get("Metaspace", {}).get("prepend_scheme", "never") != "never"
            self.strip_first_space = "Strip" in steps or prepended
        else:
            raise TokenizerError(
                f"a tokenizer with decoder {', '.join(map(str, steps))} is not supported; supported are "
                "ByteLevel, ByteFallback and Metaspace"
            )

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        self[token_id] = found = self._convert(token)
        return found


def _byte_level(token: str) -> bytes:
    alphabet = _byte_alphabet()
    # A token with a character outside of the alphabet was added as plain text.
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()


def _sentencepiece(token: str) -> bytes:
    if found := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(found[1], 16)])
    return token.replace(_SPACE, " ").encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: visible Latin-1 bytes are themselves, the others follow from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(visible)]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
