"""What holds values in Python, and how to look there: dictionaries, lists, sets, closures, objects."""

import array
import contextvars
import types
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

MISSING = object()

ARRAYS = (np.ndarray, array.array, bytearray)
"""They hold one thing, their contents, and make it anew whenever it is asked for."""

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
    if isinstance(holder, PartOf):
        return [(name, holder.whole[name]) for name in holder.names if name in holder.whole]
    if isinstance(holder, type):
        entries = vars(holder).items()
        return [(key, value) for key, value in entries if not key.startswith("__") and not callable(value)]
    return [(name, getattr(holder, name)) for name in slots_of(holder)]


def item_of(holder: Any, key: Any) -> Any:
    """What stands there, or None."""
    if isinstance(holder, dict):
        return holder.get(key)
    if isinstance(holder, type):
        return vars(holder).get(key)
    if isinstance(holder, ARRAYS):
        return bytes(holder) if isinstance(holder, bytearray) else holder.tobytes()
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
    if isinstance(holder, dict):
        holder[key] = value
    elif isinstance(holder, types.CellType):
        holder.cell_contents = value
    elif isinstance(holder, PartOf):
        holder.whole[key] = value
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
