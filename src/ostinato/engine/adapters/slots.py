"""Which version of which adapter has which slot on the device.

Note [When a slot is rewritten]
A slot belongs to the requests that run with its version: while one of them has a row, nobody else gets it.
When the last one has left, steps in flight may still compute for its row, as in Note [One step ahead] of the
scheduler; and as with pages that is sound, for new contents are written behind these steps on the device, in
the order of launches. What was assigned and is not written yet stays noted until it is, whatever fails.

Note [Pinned and replaced]
A pinned version keeps its slot while others come and go. Requests of a version that was replaced since they
came are the exception: nobody could refuse them any more, and they may find all slots kept. They take one
that nobody runs with, and the pinned version gets the next that comes free.
"""

from __future__ import annotations

from collections.abc import Iterable

from .version import AdapterVersion

NO_SLOT = -1


class AdapterSlots:
    """The books; the memory is elsewhere."""

    def __init__(self, num_slots: int) -> None:
        self.tenants: list[AdapterVersion | None] = [None] * num_slots
        """What each slot holds, or will hold by the next step."""
        self.unwritten: dict[int, AdapterVersion] = {}
        """What the device does not have yet."""
        self._num_running = [0] * num_slots
        self._least_recent = list(range(num_slots))
        self._absent_pinned: set[int] = set()
        """Numbers of pinned versions that have no slot yet: one is kept free for each."""

    def slot_of(self, version: AdapterVersion) -> int | None:
        """Where it is."""
        return next((slot for slot, held in enumerate(self.tenants) if _is(held, version)), None)

    def can_take(self, version: AdapterVersion) -> bool:
        """Whether a request with this version could run now."""
        if self.slot_of(version) is not None:
            return True
        passes = not version.is_current or version.number in self._absent_pinned
        return len(self._open_to(version)) > (0 if passes else len(self._absent_pinned))

    def take(self, version: AdapterVersion) -> int:
        """The slot of a request that gets a row; `can_take` says whether there is one."""
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
        """Keep a slot for it, from the next one that is free on."""
        version.is_pinned = True
        if self.slot_of(version) is None:
            self._absent_pinned.add(version.number)

    def retire(self, version: AdapterVersion) -> None:
        """Nobody new gets this version."""
        version.is_current = version.is_pinned = False
        self._absent_pinned.discard(version.number)
        slot = self.slot_of(version)
        if slot is not None:
            self._let_go(slot)

    def written(self, slot: int) -> None:
        """The device has it."""
        del self.unwritten[slot]

    def contents_are_gone(self) -> None:
        """Of all slots: each is to be written again before somebody uses it."""
        self.unwritten = {slot: held for slot, held in enumerate(self.tenants) if held is not None}

    def restore(self, slots: Iterable[int]) -> None:
        """Make the books anew: requests with these slots run, and no others."""
        self._num_running = [0] * len(self.tenants)
        for slot in slots:
            self._num_running[slot] += 1
        for slot in range(len(self.tenants)):
            self._let_go(slot)

    def _let_go(self, slot: int) -> None:
        """Forget what nobody will ask for again."""
        held = self.tenants[slot]
        if held is not None and not held.is_current and not self._num_running[slot]:
            self.tenants[slot] = None
            self.unwritten.pop(slot, None)

    def check_integrity(self, slots: Iterable[int]) -> None:
        """Raise unless requests with exactly these slots run."""
        counted = [0] * len(self.tenants)
        for slot in slots:
            counted[slot] += 1
        assert counted == self._num_running, "a slot is counted wrongly"
        numbers = [held.number for held in self.tenants if held is not None]
        assert len(numbers) == len(set(numbers)), "a version has two slots"

    def _open_to(self, version: AdapterVersion) -> list[int]:
        """Slots that it may get: those of nobody first, then the least recently used; of pinned ones see Note
        [Pinned and replaced]."""
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
