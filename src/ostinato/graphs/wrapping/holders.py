"""What holds values in Python, and how to look there: containers, closures, objects, buffers."""

import array
import contextvars
import ctypes
import mmap
import pickle
import random
import types
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

MISSING = object()

_OF_C: Any = ctypes.Structure.__mro__[1]
"""What numbers, arrays and structures of `ctypes` are: also the values that processes share."""
ARRAYS = (np.ndarray, array.array, bytearray, memoryview, mmap.mmap, _OF_C)
"""They hold one thing, their contents, and make it anew whenever it is asked for."""
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
"""So do they: a state."""
CONTENTS = "contents"
WHOLE = ("all entries",)
"""The place in a large container that stands for all."""

Key = tuple[int, Any]
"""A holder by identity, and a place in it."""


class PartOf:
    """Some entries of a dictionary: the global variables that a function assigns."""

    def __init__(self, whole: dict[str, Any], names: Collection[str]) -> None:
        self.whole, self.names = whole, names


def identity(holder: Any) -> int:
    """Who it is: part of a dictionary is that dictionary."""
    return id(holder.whole if isinstance(holder, PartOf) else holder)


def slot_names(kind: type) -> Iterator[str]:
    """The names of attributes that objects of a class keep outside `__dict__`."""
    for base in kind.__mro__:
        declared = vars(base).get("__slots__", ())
        for name in (declared,) if isinstance(declared, str) else declared:
            is_private = name.startswith("__") and not name.endswith("__")
            if name not in ("__dict__", "__weakref__"):
                yield f"_{base.__name__.lstrip('_')}{name}" if is_private else name


def slots_of(value: Any) -> list[str]:
    """The names of an object's slots that are filled."""
    return [name for name in slot_names(type(value)) if hasattr(value, name)]


def items_of(holder: Any) -> list[tuple[Any, Any]]:
    """What a dictionary, list, closure or object with slots holds, by key; of a set, what it has is a key."""
    if isinstance(holder, dict):
        return list(holder.items())
    if isinstance(holder, set):
        return [(element, True) for element in holder]
    if isinstance(holder, contextvars.ContextVar):
        return [("value", holder.get(None))]
    if isinstance(holder, types.CellType):
        return [("contents", item_of(holder, "contents"))]
    if isinstance(holder, list | tuple | deque):
        return list(enumerate(holder))
    if isinstance(holder, (*ARRAYS, *GENERATORS)):
        return [(CONTENTS, item_of(holder, CONTENTS))]
    if isinstance(holder, PartOf):
        return [(name, holder.whole[name]) for name in holder.names if name in holder.whole]
    if isinstance(holder, type):
        entries = vars(holder).items()
        return [(key, value) for key, value in entries if not key.startswith("__") and not callable(value)]
    return [(name, getattr(holder, name)) for name in slots_of(holder)]


def item_of(holder: Any, key: Any) -> Any:
    """What stands there, or None."""
    if key is WHOLE:
        return dict(holder) if isinstance(holder, dict) else tuple(holder)
    if isinstance(holder, dict):
        return holder.get(key)
    if isinstance(holder, type):
        return vars(holder).get(key)
    if isinstance(holder, ARRAYS):
        return _contents_of(holder)
    if isinstance(holder, GENERATORS):
        return _state_of(holder)
    if isinstance(holder, set):
        return key in holder or None
    if isinstance(holder, contextvars.ContextVar):
        return holder.get(None)
    if isinstance(holder, types.CellType):
        try:
            return holder.cell_contents
        except ValueError:  # not assigned yet
            return None
    if isinstance(holder, list | tuple | deque):
        return holder[key] if key < len(holder) else None
    return holder.whole.get(key) if isinstance(holder, PartOf) else getattr(holder, key, None)


def put(holder: Any, key: Any, value: Any) -> None:
    """Let a value stand there."""
    if isinstance(holder, dict | list):
        holder[key] = value
    elif isinstance(holder, types.CellType):
        holder.cell_contents = value
    elif isinstance(holder, PartOf):
        holder.whole[key] = value
    elif isinstance(holder, ARRAYS):
        _put_contents(holder, value)
    elif isinstance(holder, GENERATORS):
        _put_state(holder, value)
    elif isinstance(holder, set):
        holder.add(key)
    elif isinstance(holder, contextvars.ContextVar):
        holder.set(value)
    else:
        setattr(holder, key, value)


def drop(holder: Any, key: Any) -> None:
    """Let nothing stand there."""
    if isinstance(holder, dict | PartOf):
        (holder if isinstance(holder, dict) else holder.whole).pop(key)
    elif isinstance(holder, set):
        holder.discard(key)
    else:
        delattr(holder, key)


def _contents_of(holder: Any) -> Any:
    if isinstance(holder, np.ndarray | array.array | memoryview):
        return holder.tobytes()
    return holder[:] if isinstance(holder, mmap.mmap) else bytes(holder)


def _put_contents(holder: Any, value: bytes) -> None:
    if isinstance(holder, np.ndarray):
        if holder.dtype.hasobject:
            return  # the objects themselves may be gone
        holder[...] = np.frombuffer(value, holder.dtype).reshape(holder.shape)
    elif isinstance(holder, _OF_C):
        ctypes.memmove(ctypes.addressof(holder), value, len(value))
    elif isinstance(holder, bytearray | mmap.mmap):
        holder[:] = value
    else:
        memoryview(holder).cast("B")[:] = value


def _state_of(holder: Any) -> Any:
    is_pythons = isinstance(holder, random.Random)
    return pickle.dumps(holder.getstate() if is_pythons else _of_bits(holder).state)


def _put_state(holder: Any, value: Any) -> None:
    if isinstance(holder, random.Random):
        holder.setstate(pickle.loads(value))
    else:
        _of_bits(holder).state = pickle.loads(value)


def _of_bits(holder: Any) -> Any:
    return holder.bit_generator if isinstance(holder, np.random.Generator) else holder._bit_generator
