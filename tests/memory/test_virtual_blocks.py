"""The C behind a saver on a GPU, with a driver that only keeps books."""

import ctypes
import shutil
from collections.abc import Iterator

import pytest

from ostinato.memory import virtual_blocks as module
from ostinato.memory.errors import SaverError
from ostinato.memory.virtual_blocks import VirtualBlocks, virtual_blocks

from .fake_driver import GRANULARITY, OUT_OF_MEMORY, WRONG, FakeDriver

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
MIB = 1 << 20


class Class:
    """A class of blocks, called as torch calls it."""

    def __init__(self, fake: FakeDriver) -> None:
        self.fake = fake
        self.native: VirtualBlocks = virtual_blocks()
        self.number = self.native.open_class(fake.driver)
        allocate, free = self.native.functions_of(self.number)
        kinds = ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p
        self._allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, *kinds)(allocate)
        self._free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *kinds)(free)
        self.held: list[int] = []

    def allocate(self, size: int, device: int = 0) -> int | None:
        address = self._allocate(size, device, None)
        self.held += [address] if address else []
        return address

    def free(self, address: int) -> None:
        self.held.remove(address)
        self._free(address, 0, 0, None)

    def pause(self) -> int:
        assert self.native.hold([self.number])
        result = self.native.unmap([self.number])
        self.native.let_go([self.number])
        return result

    def resume(self) -> int:
        assert self.native.hold([self.number])
        result = self.native.map([self.number])
        self.native.let_go([self.number])
        return result

    def close(self) -> None:
        self.fake.fails.clear()
        for address in list(self.held):
            self.free(address)
        self.native.close_class(self.number)


@pytest.fixture
def fake() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def blocks(fake: FakeDriver) -> Iterator[Class]:
    made = Class(fake)
    yield made
    made.close()
    assert not fake.created
    assert not fake.mapped
    assert not fake.reserved


def test_a_block_has_whole_pages_and_can_be_accessed(blocks: Class, fake: FakeDriver) -> None:
    address = blocks.allocate(3 * MIB)
    assert fake.mapped[address][0] == fake.used == 4 * MIB
    assert address in fake.accessible
    [block] = blocks.native.blocks([blocks.number])
    assert (block.address, block.size, block.is_mapped) == (address, 4 * MIB, 1)


def test_addresses_stay_when_memory_goes_and_comes(blocks: Class, fake: FakeDriver) -> None:
    addresses = {blocks.allocate(size * MIB) for size in (2, 20, 512)}
    assert blocks.pause() == 0
    assert fake.used == 0
    assert set(fake.reserved) == addresses
    assert blocks.allocate(MIB) is None, "nothing is given out of what has no memory"
    assert blocks.resume() == 0
    assert set(fake.mapped) == fake.accessible == addresses
    assert blocks.allocate(MIB) is not None


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemAddressReserve"])
def test_an_allocation_that_fails_leaves_nothing(blocks: Class, fake: FakeDriver, function: str) -> None:
    fake.fails.add(function)
    assert blocks.allocate(MIB) is None
    assert not fake.created
    assert not fake.reserved
    assert not blocks.native.blocks([blocks.number])


@pytest.mark.parametrize("function", ["cuMemMap", "cuMemSetAccess"])
def test_memory_that_cannot_be_mapped_is_not_kept(blocks: Class, fake: FakeDriver, function: str) -> None:
    blocks.allocate(MIB)
    blocks.pause()
    fake.fails.add(function)
    assert blocks.resume() == WRONG
    assert fake.used == 0
    fake.fails.clear()
    assert blocks.resume() == 0


def test_too_little_memory_takes_none(blocks: Class, fake: FakeDriver) -> None:
    addresses = {blocks.allocate(2 * MIB) for _ in range(5)}
    blocks.pause()
    fake.capacity = 8 * MIB
    assert blocks.resume() == OUT_OF_MEMORY
    assert fake.used == 0
    assert not fake.mapped
    assert blocks.allocate(MIB) is None, "it is still paused"
    fake.capacity = 10 * MIB
    assert blocks.resume() == 0
    assert set(fake.mapped) == addresses


def test_a_release_that_fails_can_be_repeated(blocks: Class, fake: FakeDriver) -> None:
    blocks.allocate(MIB)
    fake.fails.add("cuMemUnmap")
    assert blocks.pause() == WRONG
    fake.fails.clear()
    assert blocks.pause() == 0
    assert fake.used == 0


def test_what_is_freed_while_paused_does_not_come_back(blocks: Class, fake: FakeDriver) -> None:
    kept, gone = blocks.allocate(2 * MIB), blocks.allocate(4 * MIB)
    assert gone is not None
    blocks.pause()
    blocks.free(gone)
    assert set(fake.reserved) == {kept}
    blocks.resume()
    assert set(fake.mapped) == {kept}


def test_what_is_freed_while_held_goes_at_the_end(blocks: Class, fake: FakeDriver) -> None:
    kept, gone = blocks.allocate(2 * MIB), blocks.allocate(4 * MIB)
    assert gone is not None
    assert blocks.native.hold([blocks.number])
    assert not blocks.native.hold([blocks.number]), "by one at a time"
    blocks.free(gone)
    assert set(fake.mapped) == {kept, gone}, "somebody may be copying it"
    assert [block.address for block in blocks.native.blocks([blocks.number])] == [kept]
    assert blocks.allocate(MIB) is None
    blocks.native.let_go([blocks.number])
    assert set(fake.mapped) == set(fake.reserved) == {kept}


def test_freeing_waits_for_the_device_as_cudafree_does(blocks: Class, fake: FakeDriver) -> None:
    address = blocks.allocate(MIB)
    assert address is not None
    fake.calls.clear()
    blocks.free(address)
    assert fake.calls.index("cuCtxSynchronize") < fake.calls.index("cuMemUnmap")


def test_another_device_gets_nothing(blocks: Class) -> None:
    assert blocks.allocate(MIB, device=1) is None


def test_classes_are_apart_and_a_closed_one_is_used_again(blocks: Class, fake: FakeDriver) -> None:
    other = Class(fake)
    mine, its = blocks.allocate(MIB), other.allocate(MIB)
    blocks.pause()
    assert set(fake.mapped) == {its}
    blocks.resume()
    other.native.close_class(other.number)
    assert other.allocate(MIB) is None
    third = Class(fake)
    assert third.number != other.number, "its last block is still there"
    assert its is not None
    other.free(its)
    fourth = Class(fake)
    assert fourth.number == other.number
    third.close()
    fourth.close()
    assert set(fake.mapped) == {mine}


def test_serials_are_never_used_twice(blocks: Class) -> None:
    seen = set()
    for _ in range(3):
        address = blocks.allocate(GRANULARITY)
        assert address is not None
        seen |= {block.serial for block in blocks.native.blocks([blocks.number])}
        blocks.free(address)
    assert len(seen) == 3


def test_more_blocks_than_were_expected_are_all_told(blocks: Class) -> None:
    addresses = [blocks.allocate(1) for _ in range(1100)]
    assert [block.address for block in blocks.native.blocks([blocks.number])] == addresses


def test_too_many_savers_are_an_error_and_not_a_crash(fake: FakeDriver) -> None:
    native, opened = virtual_blocks(), []

    def open_all() -> None:
        while True:
            opened.append(native.open_class(fake.driver))

    with pytest.raises(SaverError, match="too many memory savers"):
        open_all()
    assert 200 < len(opened) <= 256
    for number in opened:
        native.close_class(number)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(SaverError, match=r"C compiler.*set CC"):
        virtual_blocks.__wrapped__()


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(SaverError, match=r"false cannot compile virtual_blocks\.c"):
        virtual_blocks.__wrapped__()
