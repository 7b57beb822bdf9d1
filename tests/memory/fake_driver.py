"""A driver of virtual memory that only keeps books, refuses what a real one refuses, and fails on demand."""

import ctypes

from ostinato.memory.virtual_blocks import DRIVER_FUNCTIONS, Driver

U64, SIZE, POINTER = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
_ARGUMENTS = {
    "cuMemAddressReserve": (ctypes.POINTER(U64), SIZE, SIZE, U64, U64),
    "cuMemAddressFree": (U64, SIZE),
    "cuMemCreate": (ctypes.POINTER(U64), SIZE, POINTER, U64),
    "cuMemRelease": (U64,),
    "cuMemMap": (U64, SIZE, SIZE, U64, U64),
    "cuMemUnmap": (U64, SIZE),
    "cuMemSetAccess": (U64, SIZE, POINTER, SIZE),
    "cuCtxPushCurrent_v2": (POINTER,),
    "cuCtxPopCurrent_v2": (POINTER,),
    "cuCtxSynchronize": (),
}
OUT_OF_MEMORY, WRONG = 2, 1
GRANULARITY = 1 << 21


class FakeDriver:
    """Memory of `capacity` bytes."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.capacity = capacity
        self.reserved: dict[int, int] = {}
        self.created: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.accessible: set[int] = set()
        self.calls: list[str] = []
        self.fails: set[str] = set()
        """Functions that fail."""
        self._next = 1 << 32
        self._functions = [
            ctypes.CFUNCTYPE(ctypes.c_int, *_ARGUMENTS[name])(self._recorded(name))
            for name in DRIVER_FUNCTIONS
        ]
        pointers = [ctypes.cast(function, POINTER) for function in self._functions]
        self.driver = Driver(*pointers, None, None, None, GRANULARITY, 0)

    @property
    def used(self) -> int:
        """Bytes of all memory that was created."""
        return sum(self.created.values())

    def _recorded(self, name):  # type: ignore[no-untyped-def]
        function = getattr(self, name)

        def call(*arguments):  # type: ignore[no-untyped-def]
            self.calls.append(name)
            return WRONG if name in self.fails else function(*arguments)

        return call

    def cuMemAddressReserve(self, out, size, alignment, address, flags):  # type: ignore[no-untyped-def]
        out[0] = self._next
        self.reserved[self._next] = size
        self._next += size
        return 0

    def cuMemAddressFree(self, address, size):  # type: ignore[no-untyped-def]
        if address in self.mapped or self.reserved.get(address) != size:
            return WRONG
        del self.reserved[address]
        return 0

    def cuMemCreate(self, out, size, properties, flags):  # type: ignore[no-untyped-def]
        if self.used + size > self.capacity:
            return OUT_OF_MEMORY
        out[0] = self._next = self._next + GRANULARITY
        self.created[out[0]] = size
        return 0

    def cuMemRelease(self, handle):  # type: ignore[no-untyped-def]
        return 0 if self.created.pop(handle, None) is not None else WRONG

    def cuMemMap(self, address, size, offset, handle, flags):  # type: ignore[no-untyped-def]
        if address in self.mapped or self.reserved.get(address) != size or self.created.get(handle) != size:
            return WRONG
        self.mapped[address] = (size, handle)
        return 0

    def cuMemUnmap(self, address, size):  # type: ignore[no-untyped-def]
        self.accessible.discard(address)
        return 0 if self.mapped.pop(address, (None,))[0] == size else WRONG

    def cuMemSetAccess(self, address, size, description, count):  # type: ignore[no-untyped-def]
        if self.mapped.get(address, (None,))[0] != size:
            return WRONG
        self.accessible.add(address)
        return 0

    def cuCtxPushCurrent_v2(self, context):  # type: ignore[no-untyped-def]
        return 0

    def cuCtxPopCurrent_v2(self, context):  # type: ignore[no-untyped-def]
        return 0

    def cuCtxSynchronize(self):  # type: ignore[no-untyped-def]
        return 0
