"""Token ids as an array, without running Python code for each."""

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
    """A list of integers as a read-only int32 array; int64 if one of them is negative or does not fit.

    Raises TypeError if an item is not an integer, OverflowError if one has more than 64 bits.
    """
    return token_array_and_highest(ids)[0]


def token_array_and_highest(ids: Any) -> tuple[IntArray, int]:
    """`token_array`, and its `highest`, which is already known at that point."""
    if isinstance(ids, str | bytes):
        raise TypeError("a string is not a list of integers")
    if isinstance(ids, torch.Tensor) and ids.dim() == 1 and ids.dtype in _AS_IN_NUMPY:
        ids = ids.numpy(force=True)
    elif isinstance(ids, array.array):
        ids = np.asarray(ids)  # not copied here: `_narrow` copies what can be written to
    found, high = _narrow(ids) if isinstance(ids, np.ndarray) else _packed(ids)
    found.setflags(write=False)
    return found, high


def is_token_array(ids: Any) -> bool:
    """Whether this looks like a result of `token_array`. That is enough: the engine checks all ids it is
    given once more anyway, for whether the model knows them."""
    return isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype == np.int32 and not ids.flags.writeable


def highest(ids: IntArray) -> int:
    """The highest of ids made by `token_array`; -1 if there are none. An invalid negative id counts as
    high."""
    if not len(ids):
        return -1
    found: int = ids.view(np.uint32 if ids.dtype == np.int32 else np.uint64).max().item()
    return found


def _narrow(ids: IntArray) -> tuple[IntArray, int]:
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(f"an array of {ids.ndim} dimensions of {ids.dtype} is not a list of integers")
    if not ids.size:
        return _NOTHING, -1
    is_plain = ids.dtype in (np.int32, np.int64)
    high = highest(ids) if is_plain else int(ids.max())
    if high >= 2**31 or (not is_plain and ids.min() < 0):
        wide = ids.astype(np.int64)
        return wide, highest(wide)
    return ids.astype(np.int32, copy=ids.flags.writeable), high


def _packed(ids: Any) -> tuple[IntArray, int]:
    """Pack any list of integers. `array` accepts integers only, in a third of numpy's time; its unsigned type
    is used because signed numbers go through a slow parser."""
    listed = ids if isinstance(ids, list | tuple) else list(ids)
    if listed and isinstance(listed[0], bool):  # in these lists all or none are: a mask instead of ids
        raise TypeError("truth values are not token ids")
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
