"""Token ids as an array, without a step of Python for each."""

from __future__ import annotations

import operator
import struct
from typing import Any

import numpy as np

IntArray = np.ndarray[Any, np.dtype[Any]]


def token_array(ids: Any) -> IntArray:
    """A list of integers as int64, not to be written to.

    TypeError if something in it is no integer; OverflowError if one has more than 64 bits.
    """
    if isinstance(ids, str | bytes):
        raise TypeError("a text is no list of integers")
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise TypeError(f"an array of {ids.ndim} dimensions of {ids.dtype} is no list of integers")
        array = ids if ids.dtype == np.int64 and not ids.flags.writeable else ids.astype(np.int64)
    else:
        listed = ids if isinstance(ids, list | tuple) else list(ids)
        try:
            # Takes what is an integer and nothing else, and a third less time than numpy.
            array = np.frombuffer(struct.pack(f"{len(listed)}q", *listed), dtype=np.int64)
        except struct.error:
            for token in listed:
                operator.index(token)
            raise OverflowError("a number of more than 64 bits") from None
    array.setflags(write=False)
    return array
