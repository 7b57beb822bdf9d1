"""Loads `virtual_blocks.c`, which is compiled once a process, and says how to call it."""

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
"""In the order in which `Driver` has them."""


class Driver(ctypes.Structure):
    """How a class of blocks gets memory: functions of the driver, and what it tells them."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in DRIVER_FUNCTIONS),
        ("properties", ctypes.c_void_p),
        ("access", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("granularity", ctypes.c_size_t),
        ("device", ctypes.c_int),
    ]


class Described(ctypes.Structure):
    """A block, as C tells of it."""

    _fields_ = [
        ("serial", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("number", ctypes.c_int32),
        ("is_mapped", ctypes.c_int32),
    ]


class VirtualBlocks:
    """The functions of the library; numbers of classes in, results of the driver out."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.allocator_of.restype = ctypes.c_void_p

    def open_class(self, driver: Driver) -> int:
        """The number of a new class."""
        number = int(self._library.open_class(ctypes.byref(driver)))
        if number == FAILED:
            raise SaverError("too many memory savers in this process: close those that are not used")
        return number

    def functions_of(self, number: int) -> tuple[int, int]:
        """Addresses of what torch calls to allocate and to free."""
        free = ctypes.cast(self._library.free_block, ctypes.c_void_p).value
        assert free is not None
        return int(self._library.allocator_of(number)), free

    def close_class(self, number: int) -> None:
        """No more blocks for it."""
        self._library.close_class(number)

    def hold(self, numbers: Sequence[int]) -> bool:
        """Whether nobody else held one of them."""
        return bool(self._library.hold_classes(*_chosen(numbers)) != FAILED)

    def let_go(self, numbers: Sequence[int]) -> None:
        """Blocks may come and go again."""
        self._library.let_go_of_classes(*_chosen(numbers))

    def blocks(self, numbers: Sequence[int]) -> list[Described]:
        """All blocks of these classes, the oldest first."""
        room = 1024
        while True:
            found = (Described * room)()
            count = int(self._library.describe_blocks(*_chosen(numbers), found, room))
            if count <= room:
                return list(found[:count])[::-1]
            room = 2 * count

    def unmap(self, numbers: Sequence[int]) -> int:
        """Of held classes."""
        return int(self._library.unmap_blocks(*_chosen(numbers)))

    def map(self, numbers: Sequence[int]) -> int:
        """Of held classes; all or none."""
        return int(self._library.map_blocks(*_chosen(numbers)))


def _chosen(numbers: Sequence[int]) -> tuple[ctypes.Array[ctypes.c_int], int]:
    return (ctypes.c_int * len(numbers))(*numbers), len(numbers)


@functools.cache
def virtual_blocks() -> VirtualBlocks:
    """The library, which stays loaded: torch may free memory until the process ends."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise SaverError("a memory saver on a GPU needs a C compiler, as Triton does: install one or set CC")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "virtual_blocks.so"
        command = [compiler, "-O1", "-shared", "-fPIC", "-pthread", "-o", str(library), str(_SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SaverError(f"{compiler} cannot compile {_SOURCE.name}: {done.stderr.strip()}")
        return VirtualBlocks(ctypes.CDLL(str(library)))
