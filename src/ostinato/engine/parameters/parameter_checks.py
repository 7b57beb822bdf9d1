"""Checks of the values in a request; each refusal begins with the name of the offending one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ostinato.graphs.errors import OstinatoError

SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Of float32, in which the device computes."""


class RequestError(OstinatoError, ValueError):
    """A request cannot be served as specified. The engine continues to serve the others."""


def check_number(name: str, value: object, low: float, high: float, rule: str) -> None:
    """Raises RequestError unless it is a number in this range that the device can hold."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]
        raise RequestError(f"{name} must be {rule}, not {value!r}")
    if abs(value) > _LARGEST:  # type: ignore[arg-type]
        raise RequestError(f"{name} must be finite and at most {_LARGEST:.2e}, not {value!r}")


def check_integer(name: str, value: object, low: int, high: float, rule: str) -> None:
    """Raises RequestError unless it is an integer in this range."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} must be {rule}, not {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raises RequestError unless it is True or False."""
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, not {value!r}")


def token_id(name: str, value: object) -> int:
    """The value, if it can be a token id; otherwise raises RequestError."""
    check_integer(name, value, 0, 2**31 - 1, "a token id (an integer of at least 0)")
    return value  # type: ignore[return-value]


def token_ids(name: str, of_one: str, given: object) -> list[int]:
    """The token ids as a new list, each once; None gives an empty list."""
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return []
    return list(dict.fromkeys(token_id(of_one, value) for value in listed(name, given, "token ids")))


def listed(name: str, given: object, of: str) -> list[Any]:
    """The values as a new list, None as an empty one. Raises RequestError for a string, and for values that
    cannot be iterated over."""
    if given is None:
        return []
    if hasattr(given, "tolist"):  # an array or a tensor: its numbers are objects of their own
        given = given.tolist()
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise RequestError(f"{name} must be a list of {of}, not {given!r}")
    return list(given)


def biases(given: object) -> dict[int, float]:
    """`logit_bias` with token ids as keys."""
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, not {given!r}")
    checked = {}
    for key, value in given.items():
        # JSON has only string keys, so the OpenAI API sends token ids as strings.
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        check_number(f"logit_bias of token {key}", value, -100.0, 100.0, "from -100 to 100")
        checked[token_id("a key of logit_bias", token)] = float(value)
    return checked


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
