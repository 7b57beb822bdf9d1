"""Words of memory in which CPython says that something has changed, compared many at once.

Note [Versions of dictionaries]
CPython 3.11 and 3.12 number every change of a dictionary (PEP 509). A dictionary whose number is the same
holds what it held, however many entries count, and most of what a step looks at is in dictionaries:
attributes of modules and objects, tables of parameters, namespaces. torch's guards read the number one by
one, from 3.12 on through a table of watchers; one gather of NumPy's reads thousands in a few microseconds.
The type of an object, which an assignment to `__class__` replaces, is such a word as well.

Note [Words of tensors]
Asking a tensor for its address, sizes and strides takes a tenth of a microsecond each, and models have
hundreds. All of it is in words as well: a tensor in Python points to one in C++ (`swap_tensors` exchanges
those), which has the geometry and points to a storage, which has the address. Each is read only when what
points to it is as it was, so that nothing is read that may be gone. Where the words are is not assumed: a
tensor of each rank is changed in every way that counts, and the words that change with it are those to read.
Where a change does not show, tensors are asked.
"""

import ctypes
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

_IS_KNOWN = (
    sys.implementation.name == "cpython"
    and sys.version_info[:2] in ((3, 11), (3, 12))
    and sys.maxsize > 1 << 32
    and not sysconfig.get_config_var("Py_TRACE_REFS")
)
"""Whether objects of this Python have these words in these places."""
_OF_TYPE, _OF_VERSION = 8, 24


_OF_CPP = range(16, 184, 8)
"""Where a tensor in C++ may keep its geometry: behind its counters, and within any version's size."""
_OF_OBJECT = range(16, 48, 8)
_RANKS = 5
"""Up to so many dimensions a tensor keeps sizes and strides in itself."""


class _Memory:
    """Words at these addresses, read all at once. Their owners must be alive whenever they are read."""

    def __init__(self, places: Sequence[int]) -> None:
        first, last = min(places), max(places)
        length = (last - first) // 8 + 1
        whole: Any = (ctypes.c_uint64 * length).from_address(
            first
        )  # of which only these places are ever read
        self._whole = np.frombuffer(whole, np.uint64)
        self._places = (np.array(places, np.uint64) - np.uint64(first)).astype(np.intp) // 8
        self._now = np.empty(len(places), np.uint64)

    def read(self) -> np.ndarray[Any, Any]:
        """What is there now, in an array that the next call overwrites."""
        return self._whole.take(self._places, out=self._now, mode="clip")


class Words:
    """The versions of dictionaries and the types of objects, as they were when they were last accepted."""

    def __init__(self, dictionaries: Sequence[Any], objects: Sequence[Any] = ()) -> None:
        """All are kept alive: their memory is read."""
        self._kept = *dictionaries, *objects
        places = [id(each) + _OF_VERSION for each in dictionaries] + [id(each) + _OF_TYPE for each in objects]
        self._is_empty = not places
        if not (_IS_KNOWN and places):
            return
        self._memory = _Memory(places)
        self.accept()

    def are_same(self) -> bool:
        """Returns whether nothing has changed; False where this Python cannot tell."""
        if not _IS_KNOWN or self._is_empty:
            return self._is_empty
        return self._memory.read().tobytes() == self._accepted.tobytes()

    def changed(self) -> list[int]:
        """The numbers of those that have changed, or may have."""
        if not _IS_KNOWN or self._is_empty:
            return list(range(len(self._kept)))
        changed: list[int] = np.flatnonzero(self._memory.read() != self._accepted).tolist()
        return changed

    def accept(self) -> None:
        """Take what is there now for right."""
        if _IS_KNOWN and not self._is_empty:
            self._accepted = self._memory.read().copy()


class TensorWords:
    """Where tensors are and how they lie there, as it was when this was made."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """All are kept alive: their memory is read."""
        self._kept = list(tensors)
        self._levels: list[tuple[_Memory, bytes]] = []
        if not all(map(_is_readable, tensors)):
            return
        found = [places for tensor in tensors if (places := _places_of(tensor.dim())) is not None]
        if not tensors or len(found) < len(tensors):
            return
        known = list(zip(tensors, found, strict=True))
        owners = _Memory([tensor._cdata + places.of_storage for tensor, places in known]).read().tolist()
        if 0 in owners:
            return
        for level in (
            [id(tensor) + places.of_cpp for tensor, places in known],
            [tensor._cdata + at for tensor, places in known for at in (places.of_storage, *places.others)],
            [owner + places.of_bytes for owner, places in zip(owners, found, strict=True)],
        ):
            memory = _Memory(level)
            self._levels.append((memory, memory.read().tobytes()))

    def are_same(self) -> bool:
        """Returns whether nothing has changed; False where that cannot be told."""
        for memory, accepted in self._levels:
            if memory.read().tobytes() != accepted:
                return False
        return bool(self._levels)


def _is_readable(tensor: torch.Tensor) -> bool:
    """Returns whether its words are those of ordinary tensors."""
    is_ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return is_ordinary and not tensor.is_nested and tensor.device.type in ("cpu", "cuda")


class _Places(NamedTuple):
    """Where tensors of one rank have what counts, see Note [Words of tensors]."""

    of_cpp: int
    """In Python's tensor: the address of that in C++."""
    of_storage: int
    """In that: the address of the storage."""
    others: tuple[int, ...]
    """Beside it: the geometry."""
    of_bytes: int
    """In the storage: the address of its bytes."""


@cache
def _places_of(rank: int) -> _Places | None:
    """The places for tensors of a rank; None if they cannot be found out."""
    if sys.implementation.name != "cpython" or sys.maxsize <= 1 << 32 or rank > _RANKS:
        return None
    with torch.inference_mode(False), torch.no_grad():
        probe = _probe(rank)
        before, storage = _words(probe), _storage(probe)
        of_cpp = [at for at in _OF_OBJECT if _word(id(probe) + at) == probe._cdata]
        of_bytes = [at for at in _OF_OBJECT if _word(storage + at) == probe.untyped_storage().data_ptr()]
        of_storage = [at for at in _OF_CPP if before[at] == storage]
        counts: set[int] = set()
        for changed in _changed(probe):
            now = _words(changed)
            if now == before:
                return None
            counts |= {at for at in _OF_CPP if now[at] != before[at]}
    if len(of_cpp) != 1 or not of_bytes or len(of_storage) != 1:
        return None
    return _Places(of_cpp[0], of_storage[0], tuple(sorted(counts - {*of_storage})), of_bytes[0])


def _probe(rank: int) -> torch.Tensor:
    strides = tuple(3 + dim for dim in range(rank))
    return torch.zeros(1 << 10, device="cpu").as_strided((2,) * rank, strides, 1).detach()


def _changed(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, with something else about it each time, and the rest as it was."""
    storage, size, stride = tensor.untyped_storage(), list(tensor.size()), list(tensor.stride())
    ways: list[tuple[Any, int, list[int], list[int]]] = [(storage, 2, size, stride)]
    ways.append((torch.zeros(1 << 10, device="cpu").untyped_storage(), 1, size, stride))
    ways.append((storage, 1, [*size, 1], [*stride, 1]))
    for dim in range(len(size)):
        ways.append((storage, 1, [*size[:dim], 3, *size[dim + 1 :]], stride))
        ways.append((storage, 1, size, [*stride[:dim], 11, *stride[dim + 1 :]]))
    for place, offset, sizes, strides in ways:
        yield tensor.set_(place, offset, sizes, strides)  # type: ignore[call-overload]
        tensor.set_(storage, 1, size, stride)  # type: ignore[call-overload]
    tensor.data = torch.zeros((), dtype=torch.complex64, device="cpu").conj()
    yield tensor


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _words(tensor: torch.Tensor) -> dict[int, int]:
    return {at: _word(tensor._cdata + at) for at in _OF_CPP}


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value
