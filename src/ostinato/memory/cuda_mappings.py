"""Blocks on a GPU: virtual memory of the driver behind `torch.cuda.MemPool`.

Every region and every graph pool is a pool of torch's caching allocator, whose segments are blocks of one
kind. torch does not know about pauses: it hands out addresses of free blocks with or without memory, so
nothing may be allocated in a paused tag.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .blocks import Backup, Block, Kind
from .errors import SaverError, SaverMemoryError
from .pinned import PinnedBuffer, pinned_buffers
from .virtual_blocks import DRIVER_FUNCTIONS, Driver, VirtualBlocks, virtual_blocks

_STREAMS = 2
"""Copies from the host run at the same time; `bench/sleep.py` measures the gain."""
_PIECE = 64 << 20
"""Bytes of one of them."""

_IMMORTAL: list[Any] = []
"""Allocators that torch may call until the process ends."""
_left_by_savers: list[Any] = []
"""Graph pools of closed savers, until the last graph in them is gone."""
_regions = threading.local()


class CudaMappings:
    """Segments of pools of torch's allocator."""

    keeps_backups = True

    def __init__(self, device: torch.device) -> None:
        self._driver = _driver_api()
        _drop_unused_graph_pools()
        torch.cuda.init()
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        torch.empty(1, device=self.device)  # makes the context
        self._context = _checked(self._driver.cuDevicePrimaryCtxRetain(self._cuda_device()))
        self._description = _Description(self._driver, self._index, int(self._context))
        self._native: VirtualBlocks = virtual_blocks()
        self._numbers: dict[Kind, int] = {}
        self._kinds: dict[int, Kind] = {}
        self._allocators: dict[Kind, Any] = {}
        self._idle: dict[Kind, list[Any]] = {}
        self._graph_pools: list[Any] = []
        self._stream = torch.cuda.Stream(self.device)
        self._inward = [torch.cuda.Stream(self.device) for _ in range(_STREAMS)]
        self._lock = threading.Lock()

    @property
    def _index(self) -> int:
        assert self.device.index is not None
        return self.device.index

    def _cuda_device(self) -> Any:
        return _checked(self._driver.cuDeviceGet(self._index))

    # -- pools of torch's allocator ----------------------------------------------------------------

    @contextmanager
    def region(self, kind: Kind) -> Iterator[None]:
        # torch lets one thread at a time allocate to a pool, and of nested pools the outermost wins.
        with self._lock:
            idle = self._idle.setdefault(kind, [])
            pool = idle.pop() if idle else self._new_pool(kind)
        open_here: list[tuple[int, Any]] = _regions.__dict__.setdefault("open", [])
        if open_here:
            _end(*open_here[-1])
        _begin(self._index, pool)
        open_here.append((self._index, pool))
        try:
            yield
        finally:
            _end(*open_here.pop())
            if open_here:
                _begin(*open_here[-1])
            with self._lock:
                idle.append(pool)

    def allocate(self, nbytes: int, kind: Kind) -> torch.Tensor:
        with self.region(kind):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def graph_pool(self, kind: Kind) -> Any:
        with self._lock:
            pool = self._new_pool(kind)
            # If a pool went before the last graph in it, torch would end the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
            self._graph_pools.append(pool)
            return pool.id

    def drop_graph_pool(self, pool: Any) -> bool:
        with self._lock:
            found = [each for each in self._graph_pools if tuple(each.id) == tuple(pool)]
            unused = [each for each in found if each.use_count() == 1]
            for each in unused:
                self._graph_pools.remove(each)
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(each))
        return len(unused) == len(found)

    def _new_pool(self, kind: Kind) -> Any:
        if kind not in self._allocators:
            number = self._native.open_class(self._description.driver)
            allocator = torch._C._cuda_customAllocator(*self._native.functions_of(number))  # type: ignore[attr-defined]
            _IMMORTAL.append(allocator)
            self._kinds[number], self._numbers[kind], self._allocators[kind] = kind, number, allocator
        with torch.cuda.device(self.device):
            return torch.cuda.MemPool(self._allocators[kind])

    # -- blocks ------------------------------------------------------------------------------------

    def _of(self, kinds: Collection[Kind]) -> list[int]:
        with self._lock:
            return [number for kind, number in self._numbers.items() if kind in kinds]

    @contextmanager
    def hold(self, kinds: Collection[Kind]) -> Iterator[None]:
        numbers = self._of(kinds)
        if not self._native.hold(numbers):
            raise SaverError(
                "this memory is already being paused or resumed by another call: wait for it to end"
            )
        try:
            yield
        finally:
            self._native.let_go(numbers)

    def blocks(self, kinds: Collection[Kind]) -> list[Block]:
        return [
            Block(each.serial, each.address, each.size, self._kinds[each.number], bool(each.is_mapped))
            for each in self._native.blocks(self._of(kinds))
        ]

    def unmap(self, kinds: Collection[Kind]) -> None:
        self.synchronize()
        result = self._native.unmap(self._of(kinds))
        if result != 0:
            raise SaverError(f"the driver could not release all memory (error {result}): call pause again")

    def has_room_for(self, blocks: Sequence[Block]) -> bool:
        free, _ = torch.cuda.mem_get_info(self.device)
        return sum(block.size for block in blocks if not block.is_mapped) <= free

    def map(self, kinds: Collection[Kind]) -> None:
        asked = sum(block.size for block in self.blocks(kinds) if not block.is_mapped)
        result = self._native.map(self._of(kinds))
        if result == 0:
            return
        # Memory in torch's cache may be enough.
        if torch.cuda.memory_reserved(self.device) > torch.cuda.memory_allocated(self.device):
            torch.cuda.empty_cache()
            result = self._native.map(self._of(kinds))
        if result == 0:
            return
        free, _ = torch.cuda.mem_get_info(self.device)
        if result == int(self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
            raise SaverMemoryError(
                f"resuming needs {asked:,} bytes on {self.device}, but only {free:,} are free: release other "
                "memory there and call resume again"
            )
        raise SaverError(f"memory of {self.device} cannot be restored: the driver returned error {result}")

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    # -- contents ----------------------------------------------------------------------------------

    def make_backups(self, blocks: Sequence[Block]) -> dict[int, Backup]:
        if not blocks:
            return {}
        made = pinned_buffers([block.size for block in blocks], self._driver, self._in_context)
        return {block.serial: buffer for block, buffer in zip(blocks, made, strict=True)}

    def copy_out(self, blocks: Sequence[Block], backups: Mapping[int, Backup]) -> None:
        with self._copying() as stream:
            for block in blocks:
                host = _pinned(backups, block).address
                _checked(self._driver.cuMemcpyDtoHAsync(host, block.address, block.size, stream))

    @contextmanager
    def copying_in(self, blocks: Sequence[Block], backups: Mapping[int, Backup]) -> Iterator[None]:
        streams = [self._driver.CUstream(stream.cuda_stream) for stream in self._inward]
        with self._in_context():
            try:
                for stream, (target, source, size) in zip(
                    itertools.cycle(streams), _pieces(blocks, backups), strict=False
                ):
                    _checked(self._driver.cuMemcpyHtoDAsync(target, source, size, stream))
                yield
            finally:
                for each in self._inward:
                    each.synchronize()

    def fill(self, blocks: Sequence[Block], word: int) -> None:
        with self._copying() as stream:
            for block in blocks:
                _checked(self._driver.cuMemsetD32Async(block.address, word, block.size // 4, stream))

    @contextmanager
    def _copying(self) -> Iterator[Any]:
        """A stream whose work is finished when the context ends, even after an exception."""
        with self._in_context():
            try:
                yield self._driver.CUstream(self._stream.cuda_stream)
            finally:
                self._stream.synchronize()

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        _checked(self._driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent()

    def close(self) -> None:
        with self._lock:
            for number in self._kinds:
                self._native.close_class(number)
            self._idle.clear()
            _left_by_savers.extend(self._graph_pools)
            self._graph_pools.clear()
        _drop_unused_graph_pools()


class _Description:
    """The description of this device's memory for the driver; kept alive because C points to it."""

    def __init__(self, api: Any, index: int, context: int) -> None:
        self._properties = api.CUmemAllocationProp()
        self._properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = index
        self._access = api.CUmemAccessDesc()
        self._access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = index
        self._access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = int(_checked(api.cuMemGetAllocationGranularity(self._properties, minimum)))
        library = ctypes.CDLL("libcuda.so.1")
        functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in DRIVER_FUNCTIONS]
        pointers = int(self._properties.getPtr()), int(self._access.getPtr()), context
        self.driver = Driver(*functions, *pointers, granularity, index)


def _drop_unused_graph_pools() -> None:
    for pool in [pool for pool in _left_by_savers if pool.use_count() == 1]:
        _left_by_savers.remove(pool)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(pool))


def _begin(index: int, pool: Any) -> None:
    torch._C._cuda_beginAllocateCurrentThreadToPool(index, pool.id)  # type: ignore[attr-defined]


def _end(index: int, pool: Any) -> None:
    torch._C._cuda_endAllocateToPool(index, pool.id)  # type: ignore[attr-defined]
    torch._C._cuda_releasePool(index, pool.id)  # type: ignore[attr-defined]


def _pieces(blocks: Sequence[Block], backups: Mapping[int, Backup]) -> Iterator[tuple[int, int, int]]:
    """Yield destination, source and size of each copy."""
    for block in blocks:
        host = _pinned(backups, block).address
        for at in range(0, block.size, _PIECE):
            yield block.address + at, host + at, min(_PIECE, block.size - at)


def _pinned(backups: Mapping[int, Backup], block: Block) -> PinnedBuffer:
    backup = backups[block.serial]
    assert isinstance(backup, PinnedBuffer)
    return backup


def _driver_api() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise SaverError(
            "a memory saver on a GPU needs cuda.bindings: run pip install cuda-bindings"
        ) from error
    return driver


def _checked(answer: Any) -> Any:
    """The values that a driver function returned after its error code."""
    if int(answer[0]) != 0:
        raise SaverError(f"a call of the CUDA driver failed: {answer[0]}")
    return answer[1] if len(answer) == 2 else answer[1:]
