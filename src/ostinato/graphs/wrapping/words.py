"""Words of memory in which CPython and torch say that something has changed, compared many at once.

Note [Versions of dictionaries]
CPython 3.11 and 3.12 number every change of a dictionary (PEP 509). A dictionary whose number is the same
holds what it held, however many entries count, and most of what a step looks at is in dictionaries:
attributes of modules and objects, tables of parameters, namespaces. torch's guards read the number one by
one, from 3.12 on through a table of watchers; one gather of NumPy's reads thousands in a few microseconds.
The type of an object, which an assignment to `__class__` replaces, is such a word as well.

Note [Words of tensors]
Asking a tensor for its address, sizes and strides takes a tenth of a microsecond each, and models have
hundreds. All of it is in words as well: a tensor in Python points to one in C++ (`swap_tensors` exchanges
those), which has the geometry and points to a storage, which has the address. Where the words are is not
assumed: tensors of each rank are given sizes, strides, offsets and storages, several of each, and exactly one
word must have followed each of them; for the type and the bits of conjugation and negation, which have
no value that could be looked for, all words that change with one of these alone are read. Each tensor's words
must then say what the tensor itself says. A tensor of which any of that does not hold is asked instead.

Note [Nothing is read that may be gone]
Dictionaries, objects and tensors in Python are kept alive here. A tensor in C++ is read only when the one in
Python still points to it, and with a storage goes a weak reference, which keeps it where it is without its
bytes. What is told is what was there at one moment of the reading; what another thread changes meanwhile may
be seen or not, as when Python asks. Without the lock of the interpreter (free threading) nothing is read.
"""

import ctypes
import sys
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

_HAS_WORDS = (
    sys.implementation.name == "cpython"
    and sys.maxsize > 1 << 32
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
)
_HAS_VERSIONS = (
    _HAS_WORDS
    and sys.version_info[:2] in ((3, 11), (3, 12))
    and not sysconfig.get_config_var("Py_TRACE_REFS")
)
"""Whether objects of this Python have these words in these places."""
_OF_TYPE, _OF_VERSION = 8, 24

_OF_CPP = range(16, 192, 8)
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

        self.read: Any = partial(self._whole.take, self._places, out=self._now, mode="clip")
        """Returns what is there now, in an array that the next call overwrites."""


_NOTHING = np.empty(0, np.uint64)


class _Kept:
    """Words as they were when they were last accepted."""

    def __init__(self, places: Sequence[int]) -> None:
        self._read = _Memory(places).read if places else lambda: _NOTHING
        self._then = self._seen = self._read().copy()
        self._bytes = self._then.tobytes()

    def are_same(self) -> bool:
        """Returns whether all say what they said."""
        return self._read().tobytes() == self._bytes

    def are_same_from(self, first: int) -> bool:
        """Returns whether those from here on do."""
        return self._read()[first:].tobytes() == self._then[first:].tobytes()

    def changed(self) -> list[int]:
        """The numbers of those that say something else."""
        self._seen = self._read().copy()
        changed: list[int] = np.flatnonzero(self._seen != self._then).tolist()
        return changed

    def accept(self, count: int) -> None:
        """Take what the first so many said for right when `changed` was asked: not what they say now, which
        nobody has looked into."""
        self._then = np.concatenate((self._seen[:count], self._then[count:]))
        self._bytes = self._then.tobytes()


class Words:
    """The versions of dictionaries, the types of objects and the geometry of tensors, as last accepted."""

    def __init__(
        self,
        dictionaries: Sequence[Any],
        objects: Sequence[Any] = (),
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        """All are kept alive: their memory is read."""
        self._kept = *dictionaries, *objects, *tensors
        self._num_objects = len(dictionaries) + len(objects)
        places = [id(each) + _OF_VERSION for each in dictionaries] + [id(each) + _OF_TYPE for each in objects]
        if not _HAS_VERSIONS:
            places = []
        self._are_told = len(places) == self._num_objects
        told = [(tensor, where) for tensor in tensors if (where := _places_in(tensor)) is not None]
        read = {id(tensor) for tensor, _ in told}
        self.unread = [tensor for tensor in tensors if id(tensor) not in read]
        """Tensors that have to be asked."""
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor, _ in told]
        self._objects = _Kept(places + [id(tensor) + where.of_cpp for tensor, where in told])
        self._tensors = _Kept([place for tensor, where in told for place in where.all_of(tensor)])

    def are_same(self) -> bool:
        """Returns whether nothing has changed; False where this Python cannot tell."""
        return self._are_told and self._objects.are_same() and self._tensors.are_same()

    def changed(self) -> list[int]:
        """The numbers of dictionaries and objects that have changed, or may have."""
        if not self._are_told:
            return list(range(self._num_objects))
        return [number for number in self._objects.changed() if number < self._num_objects]

    def have_tensors_changed(self) -> bool:
        """Returns whether one of those that are read has."""
        first = self._num_objects if self._are_told else 0
        # Only where tensors of Python point to what they did is that there to be read.
        return not self._objects.are_same_from(first) or not self._tensors.are_same()

    def accept(self) -> None:
        """Take what dictionaries and objects were for right when `changed` was asked."""
        if self._are_told:
            self._objects.accept(self._num_objects)


class _Places(NamedTuple):
    """Where tensors of one rank have what counts, see Note [Words of tensors]."""

    of_cpp: int
    """In Python's tensor: the address of that in C++."""
    of_storage: int
    """In that: the address of the storage."""
    of_numbers: tuple[int, ...]
    """Beside it: the rank, the offset, sizes and strides."""
    others: tuple[int, ...]
    """And how its elements are to be read."""
    of_bytes: int
    """In the storage: the address of its bytes."""

    def all_of(self, tensor: torch.Tensor) -> list[int]:
        """The addresses of a tensor's words in C++."""
        offsets = self.of_storage, *self.of_numbers, *self.others
        return [*(tensor._cdata + at for at in offsets), _storage_of(tensor) + self.of_bytes]

    def hold_for(self, tensor: torch.Tensor) -> bool:
        """Returns whether its words say what it says itself."""
        cpp, storage = tensor._cdata, _storage_of(tensor)
        return (
            _word(id(tensor) + self.of_cpp) == cpp
            and _word(cpp + self.of_storage) == storage
            and tuple(_word(cpp + at) for at in self.of_numbers) == _numbers_of(tensor)
            and _word(storage + self.of_bytes) == tensor.untyped_storage().data_ptr()
        )


def _places_in(tensor: torch.Tensor) -> _Places | None:
    """Where the words of a tensor are; None if it has to be asked."""
    is_ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not is_ordinary or tensor.is_nested or tensor.device.type not in ("cpu", "cuda"):
        return None
    places = _places_of(tensor.dim())
    return places if places is not None and places.hold_for(tensor) else None


@cache
def _places_of(rank: int) -> _Places | None:
    """The places for tensors of a rank; None if they cannot be found out."""
    layout = _layout() if rank <= _RANKS else None
    if layout is None:
        return None
    of_rank, of_offset, *others = layout.of_numbers
    numbers = of_rank, of_offset, *others[:rank], *others[_RANKS : _RANKS + rank]
    places = layout._replace(of_numbers=numbers)
    return places if all(places.hold_for(_probe(rank, number)) for number in range(3)) else None


@cache
def _layout() -> _Places | None:
    """The places for tensors of the highest rank."""
    if not _HAS_WORDS:
        return None
    with torch.inference_mode(False), torch.no_grad():
        probes = [_probe(_RANKS, number) for number in range(3)]
        of_cpp = _following([(id(probe), probe._cdata) for probe in probes], _OF_OBJECT)
        of_storage = _following([(probe._cdata, _storage_of(probe)) for probe in probes], _OF_CPP)
        of_bytes = _following(
            [(_storage_of(probe), probe.untyped_storage().data_ptr()) for probe in probes], _OF_OBJECT
        )
        ranks = [_probe(rank, 0) for rank in (_RANKS, 2, 0)]
        of_numbers = [_following([(probe._cdata, probe.dim()) for probe in ranks], _OF_CPP)]
        for values in list(zip(*map(_numbers_of, probes), strict=True))[1:]:
            values_of = zip(probes, values, strict=True)
            of_numbers.append(_following([(probe._cdata, value) for probe, value in values_of], _OF_CPP))
        others = [_changing_with(change) for change in (_another_type, torch.conj, torch._neg_view)]
    known = [at for at in of_numbers if at is not None]
    if of_cpp is None or of_storage is None or of_bytes is None or len(known) < len(of_numbers):
        return None
    if not all(others):
        return None
    rest = set().union(*others) - {*known, of_storage}
    return _Places(of_cpp, of_storage, tuple(known), tuple(sorted(rest)), of_bytes)


def _probe(rank: int, number: int) -> torch.Tensor:
    """A tensor whose numbers are all different, and others for each `number`; its bytes are NumPy's, so that
    their address is not that of what owns them."""
    sizes = tuple(2 + (dim + number) % _RANKS for dim in range(rank))
    strides = tuple(1000 + 100 * dim + 17 * number for dim in range(rank))
    offset = 500 + number
    reach = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
    return torch.from_numpy(np.zeros(reach, np.float32)).as_strided(sizes, strides, offset).detach()


def _numbers_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.dim(), int(tensor.storage_offset()), *tensor.size(), *tensor.stride()


def _following(pairs: Sequence[tuple[int, int]], offsets: Sequence[int]) -> int | None:
    """The one place behind each of these addresses where the value that goes with it stands."""
    found = [at for at in offsets if all(_word(address + at) == value for address, value in pairs)]
    return found[0] if len(found) == 1 else None


def _changing_with(change: Callable[[torch.Tensor], torch.Tensor]) -> set[int]:
    """The places in C++ whose words change with something else about a tensor."""
    tensor = torch.zeros(3, dtype=torch.complex64, device="cpu")
    before = [_word(tensor._cdata + at) for at in _OF_CPP]
    tensor.data = change(tensor)
    now = [_word(tensor._cdata + at) for at in _OF_CPP]
    return {at for at, was, is_now in zip(_OF_CPP, before, now, strict=True) if was != is_now}


def _another_type(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.float64)


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value
