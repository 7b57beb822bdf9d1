"""Token ids as an array, without a step of Python for each."""

from __future__ import annotations

import array
import operator
import struct
from typing import Any

import numpy as np
import torch

IntArray = np.ndarray[Any, np.dtype[Any]]

_NOTHING = np.array([], dtype=np.int32)
_AS_IN_NUMPY = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def token_array(ids: Any) -> IntArray:
    """A list of integers as int32, not to be written to; as int64 if one of them is negative or does not fit.

    TypeError if something in it is no integer; OverflowError if one has more than 64 bits.
    """
    return token_array_and_highest(ids)[0]


def token_array_and_highest(ids: Any) -> tuple[IntArray, int]:
    """`token_array`, and `highest` of it, which is known when it is made."""
    if isinstance(ids, str | bytes):
        raise TypeError("a text is no list of integers")
    if isinstance(ids, torch.Tensor) and ids.dim() == 1 and ids.dtype in _AS_IN_NUMPY:
        ids = ids.numpy(force=True)
    elif isinstance(ids, array.array):
        ids = np.asarray(ids)  # as it is: `_narrow` copies what can be written to
    found, high = _narrow(ids) if isinstance(ids, np.ndarray) else _packed(ids)
    found.setflags(write=False)
    return found, high


def is_token_array(ids: Any) -> bool:
    """Whether this looks like what `token_array` makes of ids: whoever takes ids from others looks at all of
    them once more anyway, to see whether the model knows them."""
    return isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype == np.int32 and not ids.flags.writeable


def highest(ids: IntArray) -> int:
    """Of ids as `token_array` makes them; -1 if there are none. One that is negative and should not be there
    counts as high."""
    if not len(ids):
        return -1
    found: int = ids.view(np.uint32 if ids.dtype == np.int32 else np.uint64).max().item()
    return found


def _narrow(ids: IntArray) -> tuple[IntArray, int]:
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(f"an array of {ids.ndim} dimensions of {ids.dtype} is no list of integers")
    if not ids.size:
        return _NOTHING, -1
    is_plain = ids.dtype in (np.int32, np.int64)
    high = highest(ids) if is_plain else int(ids.max())
    if high >= 2**31 or (not is_plain and ids.min() < 0):
        wide = ids.astype(np.int64)
        return wide, highest(wide)
    return ids.astype(np.int32, copy=ids.flags.writeable), high


def _packed(ids: Any) -> tuple[IntArray, int]:
    """Of anything that lists integers. `array` takes what is one and nothing else, and a third of the time of
    numpy; of unsigned numbers, for signed ones are read by a parser."""
    listed = ids if isinstance(ids, list | tuple) else list(ids)
    if listed and isinstance(listed[0], bool):  # of these lists are, or none is: a mask in the place of ids
        raise TypeError("truth values are no token ids")
    try:
        found = np.frombuffer(array.array("I", listed), dtype=np.int32) if listed else _NOTHING
        if (high := highest(found)) < 2**31:
            return found, high
    except (OverflowError, TypeError):
        pass
    try:
        wide = np.frombuffer(struct.pack(f"{len(listed)}q", *listed), dtype=np.int64)
        return wide, highest(wide)
    except struct.error:
        for token in listed:
            operator.index(token)
        raise OverflowError("a number of more than 64 bits") from None
