"""Which version of which adapter has which slot on the device.

Note [When a slot is rewritten]
A slot belongs to the requests that run with its version: while one of them has a row, nobody else gets it.
After the last one has left, steps in flight may still compute for its row, as in Note [One step ahead] of the
scheduler. As with pages, that is sound: new contents are written after these steps on the device, in launch
order. A slot that is assigned but not yet written stays noted until it is written, whatever fails.

Note [Pinned and replaced]
A pinned version keeps its slot while others come and go. The exception: requests whose version was replaced
after they arrived can no longer be refused, yet may find all slots reserved. They take a slot that no request
runs with, and the pinned version gets the next one that becomes free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ostinato.models.adapters.adapter import Adapter


@dataclass(eq=False)
class AdapterVersion:
    """Different contents are a different version, even under the same name."""

    name: str
    number: int
    """Identifies these contents in this engine; never reused."""
    adapter: Adapter | None
    """On the host; None: dropped, to be read again on the next request."""
    num_users: int = 0
    """Unfinished requests that compute with it."""
    is_current: bool = True
    """Whether new requests of that name get it."""
    is_pinned: bool = False
    """Whether it keeps its slot when unused."""

    @property
    def salt(self) -> bytes:
        """Prefixes the keys of its requests in the prefix cache. No client's text can begin with it: the byte
        does not occur in UTF-8."""
        return b"\xff" + self.number.to_bytes(8, "little")


NO_SLOT = -1


class AdapterSlots:
    """The bookkeeping only; the memory is elsewhere."""

    def __init__(self, num_slots: int) -> None:
        self.tenants: list[AdapterVersion | None] = [None] * num_slots
        """What each slot holds, or will hold by the next step."""
        self.unwritten: dict[int, AdapterVersion] = {}
        """Slots whose contents the device does not have yet."""
        self._num_running = [0] * num_slots
        self._least_recent = list(range(num_slots))
        self._absent_pinned: set[int] = set()
        """Numbers of pinned versions that have no slot yet: one is kept free for each."""

    def slot_of(self, version: AdapterVersion) -> int | None:
        """The slot that holds it, or None."""
        return next((slot for slot, held in enumerate(self.tenants) if _is(held, version)), None)

    def can_take(self, version: AdapterVersion) -> bool:
        """Whether a request with this version could run now."""
        if self.slot_of(version) is not None:
            return True
        passes = not version.is_current or version.number in self._absent_pinned
        return len(self._open_to(version)) > (0 if passes else len(self._absent_pinned))

    def take(self, version: AdapterVersion) -> int:
        """The slot for a request that gets a row; `can_take` must have allowed it."""
        slot = self.slot_of(version)
        if slot is None:
            slot = self._open_to(version)[0]
            held = self.tenants[slot]
            if held is not None and held.is_pinned:
                self._absent_pinned.add(held.number)
            self.unwritten[slot] = version
            self.tenants[slot] = version
            self._absent_pinned.discard(version.number)
        self._num_running[slot] += 1
        self._least_recent.remove(slot)
        self._least_recent.append(slot)
        return slot

    def leave(self, slot: int) -> None:
        """The request has given its row back."""
        assert self._num_running[slot] > 0
        self._num_running[slot] -= 1
        self._let_go(slot)

    def pin(self, version: AdapterVersion) -> None:
        """Reserve a slot for it, from the next free one on."""
        version.is_pinned = True
        if self.slot_of(version) is None:
            self._absent_pinned.add(version.number)

    def retire(self, version: AdapterVersion) -> None:
        """Give this version to no further requests."""
        version.is_current = version.is_pinned = False
        self._absent_pinned.discard(version.number)
        slot = self.slot_of(version)
        if slot is not None:
            self._let_go(slot)

    def written(self, slot: int) -> None:
        """The device has the slot's contents."""
        del self.unwritten[slot]

    def contents_are_gone(self) -> None:
        """All slots were lost: each must be rewritten before it is used."""
        self.unwritten = {slot: held for slot, held in enumerate(self.tenants) if held is not None}

    def restore(self, slots: Iterable[int]) -> None:
        """Rebuild the books: requests with exactly these slots run."""
        self._num_running = [0] * len(self.tenants)
        for slot in slots:
            self._num_running[slot] += 1
        for slot in range(len(self.tenants)):
            self._let_go(slot)

    def _let_go(self, slot: int) -> None:
        """Free the slot if no request will use its version again."""
        held = self.tenants[slot]
        if held is not None and not held.is_current and not self._num_running[slot]:
            self.tenants[slot] = None
            self.unwritten.pop(slot, None)

    def check_integrity(self, slots: Iterable[int]) -> None:
        """Assert that requests with exactly these slots run."""
        counted = [0] * len(self.tenants)
        for slot in slots:
            counted[slot] += 1
        assert counted == self._num_running, "the number of requests of a slot is wrong"
        numbers = [held.number for held in self.tenants if held is not None]
        assert len(numbers) == len(set(numbers)), "a version has two slots"

    def _open_to(self, version: AdapterVersion) -> list[int]:
        """Slots that it may get: empty ones first, then the least recently used, then, as Note [Pinned and
        replaced] says, pinned ones."""
        free = [slot for slot in self._least_recent if not self._num_running[slot]]
        empty = [slot for slot in free if self.tenants[slot] is None]
        kept = [] if version.is_current else [slot for slot in free if _is_pinned(self.tenants[slot])]
        return [*empty, *(slot for slot in free if _can_go(self.tenants[slot])), *kept]


def _is(held: AdapterVersion | None, version: AdapterVersion) -> bool:
    return held is not None and held.number == version.number


def _is_pinned(held: AdapterVersion | None) -> bool:
    return held is not None and held.is_pinned


def _can_go(held: AdapterVersion | None) -> bool:
    return held is not None and not held.is_pinned
