"""Host memory that a GPU copies to and from at full speed."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from .errors import SaverMemoryError

InContext = Callable[[], AbstractContextManager[None]]

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of which Python's mmap does not know
_THREADS = 8
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PinnedBuffer:
    """Anonymous pages, as large as possible, registered with the driver.

    Several times faster than cuMemHostAlloc, because several threads allocate the pages.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self._unregister: Callable[[], None] | None = None

    def touch(self) -> None:
        """Allocate the pages; a kernel that cannot do so allocates them when they are registered."""
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _libc.madvise(self.address, self.nbytes, mmap.MADV_HUGEPAGE)
        _libc.madvise(self.address, self.nbytes, _POPULATE_WRITE)

    def register(self, driver: Any, in_context: InContext) -> None:
        """Register the pages with the driver; raises SaverMemoryError."""

        def unregister() -> None:
            with in_context():
                driver.cuMemHostUnregister(self.address)

        with in_context():
            flags = driver.CU_MEMHOSTREGISTER_PORTABLE
            [result] = driver.cuMemHostRegister(self.address, self.nbytes, flags)
        if int(result) != 0:
            raise SaverMemoryError(
                f"{self.nbytes:,} bytes on the host cannot be pinned: the driver returned {result}"
            )
        self._unregister = unregister

    def free(self) -> None:
        """Free the pages."""
        if self._unregister is not None:
            self._unregister()
            self._unregister = None
        self._pages.close()


def pinned_buffers(sizes: Sequence[int], driver: Any, in_context: InContext) -> list[PinnedBuffer]:
    """One buffer of each size, or SaverMemoryError and none. `in_context`: context for driver calls."""
    _refuse_more_than_there_is(sum(sizes))
    made: list[PinnedBuffer] = []
    try:
        made = [PinnedBuffer(size) for size in sizes]
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
            list(threads.map(PinnedBuffer.touch, made))
        for buffer in made:
            buffer.register(driver, in_context)
    except BaseException as error:
        for buffer in made:
            buffer.free()
        if isinstance(error, OSError):
            raise SaverMemoryError(
                f"{sum(sizes):,} bytes on the host cannot be allocated: {error}"
            ) from error
        raise
    return made


def _refuse_more_than_there_is(nbytes: int) -> None:
    """Check in advance: the system would rather kill a process than refuse memory."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            if nbytes > available:
                raise SaverMemoryError(
                    f"a backup needs {nbytes:,} bytes of host memory, but only {available:,} bytes are "
                    "available: drop the data instead of backing it up"
                )
