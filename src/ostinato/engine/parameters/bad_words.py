"""Words that must not be generated, as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .parameter_checks import RequestError


def token_sequences(
    words: Sequence[str | Sequence[int]], encode: Callable[[str], Sequence[int]]
) -> list[list[int]]:
    """Each way in which one of these words is written, once: at the start of a text, and after a space.

    `encode` must add no special tokens. Words that are token ids already stay as they are.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        bare = word.lstrip()
        for written in (bare, f" {bare}") if bare else (word,):
            ids = tuple(encode(written))
            if not ids:
                raise RequestError(f"bad_words: {word!r} has no tokens: remove it")
            found[ids] = None
    return [list(ids) for ids in found]
