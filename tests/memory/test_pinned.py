"""Pinned buffers, with a driver that only counts what is registered."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from ostinato.memory import SaverMemoryError, pinned
from ostinato.memory.pinned import pinned_buffers

MIB = 1 << 20


class Counting:
    """Registers so many buffers and no more."""

    CU_MEMHOSTREGISTER_PORTABLE = 1

    def __init__(self, most: int = 100) -> None:
        self.most = most
        self.registered: dict[int, int] = {}

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[int]:
        if len(self.registered) >= self.most:
            return (2,)
        self.registered[address] = size
        return (0,)

    def cuMemHostUnregister(self, address: int) -> tuple[int]:
        del self.registered[address]
        return (0,)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_buffers_have_their_pages_are_registered_and_go_again() -> None:
    driver = Counting()
    before = resident_bytes()
    buffers = pinned_buffers([8 * MIB, 16 * MIB], driver, nullcontext)
    assert driver.registered == {buffer.address: buffer.nbytes for buffer in buffers}
    for buffer in buffers:
        buffer.free()
    assert driver.registered == {}
    assert resident_bytes() - before < 8 * MIB


def test_one_that_cannot_be_registered_leaves_none() -> None:
    driver = Counting(most=2)
    with pytest.raises(SaverMemoryError, match="cannot be pinned"):
        pinned_buffers([MIB] * 3, driver, nullcontext)
    assert driver.registered == {}


def test_more_than_the_host_has_is_refused_before_it_is_touched() -> None:
    with pytest.raises(
        SaverMemoryError, match=r"bytes of host memory, but only .* are available: drop the data"
    ):
        pinned_buffers([1 << 45], Counting(), nullcontext)
    pinned._refuse_more_than_there_is(MIB)
