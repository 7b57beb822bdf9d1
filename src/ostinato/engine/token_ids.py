"""Token ids as an array, without a step of Python for each."""

from __future__ import annotations

import array
import operator
import struct
from typing import Any

import numpy as np
import torch

IntArray = np.ndarray[Any, np.dtype[Any]]

_AT_A_TIME = 1024
"""Numbers are looked at three times, by which they should still be in the processor's cache."""
_pack_many = struct.Struct(f"{_AT_A_TIME}I").pack
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def token_array(ids: Any) -> IntArray:
    """A list of integers as int32, not to be written to; as int64 if one of them is negative or does not fit.

    TypeError if something in it is no integer; OverflowError if one has more than 64 bits.
    """
    if isinstance(ids, str | bytes):
        raise TypeError("a text is no list of integers")
    if isinstance(ids, torch.Tensor) and ids.dim() == 1 and ids.dtype in _INTEGERS:
        ids = ids.numpy(force=True)
    elif isinstance(ids, array.array):
        ids = np.array(ids)
    found = _narrow(ids) if isinstance(ids, np.ndarray) else _packed(ids)
    found.setflags(write=False)
    return found


def _narrow(ids: IntArray) -> IntArray:
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(f"an array of {ids.ndim} dimensions of {ids.dtype} is no list of integers")
    is_short = ids.dtype == np.int32
    if ids.size and not (ids.min() >= 0 and (is_short or ids.max() < 2**31)):
        return ids.astype(np.int64)
    return ids.astype(np.int32, copy=ids.flags.writeable)


def _packed(ids: Any) -> IntArray:
    """Of anything that lists integers. `struct` takes what is one and nothing else, and half the time of
    numpy; unsigned numbers take it less than signed ones."""
    listed = ids if isinstance(ids, list | tuple) else list(ids)
    rest = len(listed) % _AT_A_TIME
    try:
        pieces = [
            _pack_many(*listed[begin : begin + _AT_A_TIME])
            for begin in range(0, len(listed) - rest, _AT_A_TIME)
        ]
        pieces.append(struct.pack(f"{rest}I", *listed[len(listed) - rest :]))
        found = np.frombuffer(b"".join(pieces), dtype=np.int32)
        if not found.size or found.min() >= 0:
            return found
    except struct.error:
        pass
    try:
        return np.frombuffer(struct.pack(f"{len(listed)}q", *listed), dtype=np.int64)
    except struct.error:
        for token in listed:
            operator.index(token)
        raise OverflowError("a number of more than 64 bits") from None
