"""Blocks on a CPU: anonymous mappings. Released ones keep their addresses and lose their pages.

Accessing a released one ends the process, as on a GPU: otherwise zeros would pass for a result. Backups are
unnamed files, so that the process really shrinks.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ostinato.graphs.dispatch_mode import DispatchMode

from .blocks import Backup, Block, Kind
from .errors import SaverError, SaverMemoryError

_PIECE = 1 << 30
"""Bytes written to a file at a time; the system's limit is a little under twice that."""
_NONE = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def protect(address: int, size: int, access: int) -> None:
    """Allow or forbid access to pages; raises OSError."""
    if _libc.mprotect(address, size, access) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class _Pages(mmap.mmap):
    """A mapping that allows weak references."""


@dataclass
class _Entry:
    pages: weakref.ref[_Pages]
    address: int
    size: int
    kind: Kind
    is_mapped: bool = True


class FileBackup:
    """The contents of one block, in an unnamed file."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115

    def write(self, pages: _Pages) -> None:
        """Write the whole block. Raises OSError if there is no room."""
        with memoryview(pages) as view:
            for start in range(0, self.nbytes, _PIECE):
                end = min(start + _PIECE, self.nbytes)
                while start < end:
                    start += os.pwrite(self._file.fileno(), view[start:end], start)

    def read_into(self, pages: _Pages) -> None:
        """Read the whole block back."""
        with memoryview(pages) as view:
            at = 0
            while at < self.nbytes:
                read = os.preadv(self._file.fileno(), [view[at : at + _PIECE]], at)
                if not read:
                    raise OSError("a backup file is shorter than what was written to it")
                at += read

    def free(self) -> None:
        """Remove the file."""
        self._file.close()


class HostMappings:
    """One mapping per tensor, freed with the tensor's storage."""

    device = torch.device("cpu")
    keeps_backups = False

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._gone: deque[int] = deque()
        self._serials = itertools.count(1)
        self._held: list[_Pages | None] = []

    @contextmanager
    def region(self, kind: Kind) -> Iterator[None]:
        with _Placing(self, kind):
            yield

    def allocate(self, nbytes: int, kind: Kind) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise SaverMemoryError(f"{nbytes:,} bytes of {kind.tag} cannot be mapped: {error}") from error
        memory = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)
        serial = next(self._serials)
        self._entries[serial] = _Entry(weakref.ref(pages), memory.data_ptr(), size, kind)
        # The garbage collector may call this anywhere, even while other code iterates over the entries.
        weakref.finalize(pages, self._gone.append, serial)
        return memory

    def graph_pool(self, kind: Kind) -> Any:
        raise SaverError("graph pools exist only on a GPU; on a CPU use `GraphMemory`")

    def drop_graph_pool(self, pool: Any) -> bool:
        return True

    @contextmanager
    def hold(self, kinds: Collection[Kind]) -> Iterator[None]:
        self._held = [entry.pages() for entry in self._living().values() if entry.kind in kinds]
        try:
            yield
        finally:
            self._held = []

    def blocks(self, kinds: Collection[Kind]) -> list[Block]:
        return [
            Block(serial, entry.address, entry.size, entry.kind, entry.is_mapped)
            for serial, entry in self._living().items()
            if entry.kind in kinds
        ]

    def unmap(self, kinds: Collection[Kind]) -> None:
        for entry, pages in self._pages_of(kinds):
            if entry.is_mapped:
                pages.madvise(mmap.MADV_DONTNEED)
                protect(entry.address, entry.size, _NONE)
                entry.is_mapped = False

    def has_room_for(self, blocks: Sequence[Block]) -> bool:
        return True

    def map(self, kinds: Collection[Kind]) -> None:
        taken: list[_Entry] = []
        try:
            for entry, _ in self._pages_of(kinds):
                if not entry.is_mapped:
                    protect(entry.address, entry.size, _READ_WRITE)
                    entry.is_mapped = True
                    taken.append(entry)
        except OSError as error:
            for entry in taken:
                protect(entry.address, entry.size, _NONE)
                entry.is_mapped = False
            raise SaverMemoryError(
                f"memory cannot be restored: {error}; free memory and resume again"
            ) from error

    def make_backups(self, blocks: Sequence[Block]) -> dict[int, Backup]:
        made: dict[int, Backup] = {}
        try:
            for block in blocks:
                made[block.serial] = FileBackup(block.size)
        except OSError as error:
            for backup in made.values():
                backup.free()
            raise SaverMemoryError(
                f"there is no room for backups in {tempfile.gettempdir()}: {error}; free space there or set "
                "TMPDIR"
            ) from error
        return made

    def copy_out(self, blocks: Sequence[Block], backups: Mapping[int, Backup]) -> None:
        try:
            for backup, pages in self._pairs(blocks, backups):
                backup.write(pages)
        except OSError as error:
            raise SaverMemoryError(
                f"there is no room for backups in {tempfile.gettempdir()}: {error}; free space there or set "
                "TMPDIR"
            ) from error

    @contextmanager
    def copying_in(self, blocks: Sequence[Block], backups: Mapping[int, Backup]) -> Iterator[None]:
        for backup, pages in self._pairs(blocks, backups):
            backup.read_into(pages)
        yield

    def fill(self, blocks: Sequence[Block], word: int) -> None:
        for block in blocks:
            pages = self._entries[block.serial].pages()
            if pages is not None:
                torch.frombuffer(pages, dtype=torch.int32).fill_(word)

    def synchronize(self) -> None:
        """Nothing to wait for: on a CPU work is finished when its call returns."""

    def close(self) -> None:
        """Nothing to do: mappings are freed with their tensors."""

    def _living(self) -> dict[int, _Entry]:
        while self._gone:
            self._entries.pop(self._gone.popleft(), None)
        return dict(self._entries)

    def _pages_of(self, kinds: Collection[Kind]) -> list[tuple[_Entry, _Pages]]:
        found = [(entry, entry.pages()) for entry in self._living().values() if entry.kind in kinds]
        return [(entry, pages) for entry, pages in found if pages is not None]

    def _pairs(
        self, blocks: Sequence[Block], backups: Mapping[int, Backup]
    ) -> Iterator[tuple[FileBackup, _Pages]]:
        for block in blocks:
            backup, pages = backups[block.serial], self._entries[block.serial].pages()
            if pages is not None:
                assert isinstance(backup, FileBackup)
                yield backup, pages


class _Placing(DispatchMode):
    """Moves new tensors of this thread into mappings before the caller sees them."""

    def __init__(self, mappings: HostMappings, kind: Kind) -> None:
        super().__init__()
        self._mappings = mappings
        self._kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            return self._placed(result, func._schema.returns[0])
        if isinstance(result, tuple | list):
            kept = [self._placed(*each) for each in zip(result, func._schema.returns, strict=False)]
            return type(result)(kept) if len(kept) == len(result) else result
        return result

    def _placed(self, result: Any, declared: Any) -> Any:
        is_new = isinstance(result, torch.Tensor) and declared.alias_info is None
        if not is_new or result.device.type != "cpu" or not result.numel():
            return result
        memory = self._mappings.allocate(result.untyped_storage().nbytes(), self._kind)
        memory.copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(result.untyped_storage()))
        strided = torch.empty(0, dtype=result.dtype, device="cpu")
        return strided.set_(memory.untyped_storage(), result.storage_offset(), result.size(), result.stride())
