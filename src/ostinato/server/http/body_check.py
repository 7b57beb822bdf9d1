"""What a body may look like before anything reads it: UTF-8 without halves of surrogate pairs, and not so
many values that reading them would hold up everybody else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ..openai.errors import ApiError

MAX_VALUES = 100_000
"""Objects, lists and texts in a body, keys included."""
MAX_NUMBERS = 2**20
"""Values of any kind; numbers, such as token ids, are cheaper than the others."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Places = np.ndarray[Any, np.dtype[np.int32]]


def check_body(body: bytes) -> None:
    """400 for a body that is not Unicode, or has too many values."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8: {error.reason} at byte {error.start}"
        raise ApiError(400, message, code="invalid_json") from None
    if b"\0" in body[:4]:
        raise ApiError(400, "the body is not JSON in UTF-8", code="invalid_json")
    may_have_surrogates = b"\\ud" in body or b"\\uD" in body
    may_be_complex = len(body) > MAX_VALUES
    if not may_have_surrogates and not may_be_complex:
        return
    # With room behind it, so that an escape at the very end can be looked at like the others.
    read = np.frombuffer(body + bytes(8), dtype=np.uint8)
    escapes = _escapes(read)
    if may_be_complex:
        _check_values(read, escapes)
    if may_have_surrogates and _has_lone_surrogate(read, escapes):
        field = _field_with_lone_surrogate(body)
        message = f"{field or 'the body'} is not valid Unicode: it has half of a surrogate pair"
        raise ApiError(400, message, param=field, code="invalid_unicode")


def _escapes(read: Bytes) -> Places:
    """Where escapes begin: of a row of backslashes, every second one is itself escaped."""
    places = np.flatnonzero(read == ord("\\")).astype(np.int32)
    if not len(places):
        return places
    numbers = np.arange(len(places), dtype=np.int32)
    begins_row = np.diff(places, prepend=-2) != 1
    row_began = np.maximum.accumulate(np.where(begins_row, numbers, np.int32(0)))
    return places[(numbers - row_began) % 2 == 0]


def _has_lone_surrogate(read: Bytes, escapes: Places) -> bool:
    """Whether a first half is not followed by a second one, or a second one not preceded by a first."""
    is_surrogate = (read[escapes + 1] == ord("u")) & ((read[escapes + 2] | 32) == ord("d"))
    places = escapes[is_surrogate]
    digit = read[places + 3] | 32  # digits have this bit already
    first = places[(digit == ord("8")) | (digit == ord("9")) | (digit == ord("a")) | (digit == ord("b"))]
    second = places[(digit >= ord("c")) & (digit <= ord("f"))]
    return not np.array_equal(first + 6, second)


def _field_with_lone_surrogate(body: bytes) -> str | None:
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        return None
    for name, value in read.items() if isinstance(read, dict) else ():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return str(name)
        except RecursionError:
            return None
    return None


def _check_values(read: Bytes, escapes: Places) -> None:
    quotes = read == ord('"')
    escaped = escapes + 1
    quotes[escaped[read[escaped] == ord('"')]] = False
    # Counted modulo 256, which is as odd as the number itself.
    is_outside = np.cumsum(quotes, dtype=np.uint8) % 2 == 0
    opening = (read == ord("[")) | (read == ord("{"))
    num_values = int(np.count_nonzero(quotes)) // 2 + int(np.count_nonzero(opening & is_outside))
    num_numbers = int(np.count_nonzero((read == ord(",")) & is_outside))
    if num_values > MAX_VALUES or num_numbers > MAX_NUMBERS:
        message = (
            f"the body has too many values: at most {MAX_VALUES:,} objects, lists and texts and "
            f"{MAX_NUMBERS:,} numbers are read"
        )
        raise ApiError(400, message, code="body_too_complex")
