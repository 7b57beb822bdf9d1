"""Words of memory in which CPython says that something has changed, compared many at once.

Note [Versions of dictionaries]
CPython 3.11 and 3.12 number every change of a dictionary (PEP 509). A dictionary whose number is the same
holds what it held, however many entries count, and most of what a step looks at is in dictionaries:
attributes of modules and objects, tables of parameters, namespaces. torch's guards read the number one by
one, from 3.12 on through a table of watchers; one gather of NumPy's reads thousands in a few microseconds.
The type of an object, which an assignment to `__class__` replaces, is such a word as well.
"""

import ctypes
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any

import numpy as np

_IS_KNOWN = (
    sys.implementation.name == "cpython"
    and sys.version_info[:2] in ((3, 11), (3, 12))
    and sys.maxsize > 1 << 32
    and not sysconfig.get_config_var("Py_TRACE_REFS")
)
"""Whether objects of this Python have these words in these places."""
_OF_TYPE, _OF_VERSION = 8, 24


class Words:
    """The versions of dictionaries and the types of objects, as they were when they were last accepted."""

    def __init__(self, dictionaries: Sequence[Any], objects: Sequence[Any] = ()) -> None:
        """All are kept alive: their memory is read."""
        self._kept = *dictionaries, *objects
        places = [id(each) + _OF_VERSION for each in dictionaries] + [id(each) + _OF_TYPE for each in objects]
        self._is_empty = not places
        if not (_IS_KNOWN and places):
            return
        first, last = min(places), max(places)
        length = (last - first) // 8 + 1
        whole: Any = (ctypes.c_uint64 * length).from_address(
            first
        )  # of which only these places are ever read
        self._memory = np.frombuffer(whole, np.uint64)
        self._places = np.array([(place - first) // 8 for place in places], np.intp)
        self._now = np.empty(len(places), np.uint64)
        self.accept()

    def are_same(self) -> bool:
        """Whether nothing has changed; False where this Python cannot tell."""
        if not _IS_KNOWN or self._is_empty:
            return self._is_empty
        now = self._memory.take(self._places, out=self._now, mode="clip")
        return bool((now == self._accepted).all())

    def changed(self) -> list[int]:
        """The numbers of those that have changed, or may have."""
        if not _IS_KNOWN or self._is_empty:
            return list(range(len(self._kept)))
        changed: list[int] = np.flatnonzero(self._memory.take(self._places) != self._accepted).tolist()
        return changed

    def accept(self) -> None:
        """Take what is there now for right."""
        if _IS_KNOWN and not self._is_empty:
            self._accepted = self._memory.take(self._places)
