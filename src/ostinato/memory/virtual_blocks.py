"""Compiles and loads `virtual_blocks.c`, once per process, and declares its functions."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .errors import SaverError

FAILED = -1
_SOURCE = Path(__file__).with_name("virtual_blocks.c")

DRIVER_FUNCTIONS = (
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxSynchronize",
)
"""In the order of the fields of `Driver`."""


class Driver(ctypes.Structure):
    """How a class of blocks gets memory: functions of the driver and their arguments."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in DRIVER_FUNCTIONS),
        ("properties", ctypes.c_void_p),
        ("access", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("granularity", ctypes.c_size_t),
        ("device", ctypes.c_int),
    ]


class Described(ctypes.Structure):
    """A block, as C describes it."""

    _fields_ = [
        ("serial", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("number", ctypes.c_int32),
        ("is_mapped", ctypes.c_int32),
    ]


class VirtualBlocks:
    """The functions of the library; they take numbers of classes and return results of the driver."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.allocator_of.restype = ctypes.c_void_p

    def open_class(self, driver: Driver) -> int:
        """Open a new class and return its number."""
        number = int(self._library.open_class(ctypes.byref(driver)))
        if number == FAILED:
            raise SaverError("there are too many memory savers in this process: close those not in use")
        return number

    def functions_of(self, number: int) -> tuple[int, int]:
        """Addresses of the functions that torch calls to allocate and to free."""
        free = ctypes.cast(self._library.free_block, ctypes.c_void_p).value
        assert free is not None
        return int(self._library.allocator_of(number)), free

    def close_class(self, number: int) -> None:
        """Refuse further blocks for a class."""
        self._library.close_class(number)

    def hold(self, numbers: Sequence[int]) -> bool:
        """Hold classes; False if one of them was already held."""
        return bool(self._library.hold_classes(*_chosen(numbers)) != FAILED)

    def let_go(self, numbers: Sequence[int]) -> None:
        """Allow blocks of these classes to be created and freed again."""
        self._library.let_go_of_classes(*_chosen(numbers))

    def blocks(self, numbers: Sequence[int]) -> list[Described]:
        """All blocks of these classes, oldest first."""
        room = 1024
        while True:
            found = (Described * room)()
            count = int(self._library.describe_blocks(*_chosen(numbers), found, room))
            if count <= room:
                return list(found[:count])[::-1]
            room = 2 * count

    def unmap(self, numbers: Sequence[int]) -> int:
        """Release the memory of held classes."""
        return int(self._library.unmap_blocks(*_chosen(numbers)))

    def map(self, numbers: Sequence[int]) -> int:
        """Allocate memory for held classes, for all or for none."""
        return int(self._library.map_blocks(*_chosen(numbers)))


def _chosen(numbers: Sequence[int]) -> tuple[ctypes.Array[ctypes.c_int], int]:
    return (ctypes.c_int * len(numbers))(*numbers), len(numbers)


@functools.cache
def virtual_blocks() -> VirtualBlocks:
    """The library, which stays loaded: torch may free memory until the process ends."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SaverError("a memory saver on a GPU needs a C compiler, like Triton: install one or set CC")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "virtual_blocks.so"
        command = [compiler, "-O1", "-shared", "-fPIC", "-pthread", "-o", str(library), str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SaverError(f"{compiler} cannot compile {_SOURCE.name}: {done.stderr.strip()}")
        return VirtualBlocks(ctypes.CDLL(str(library)))
