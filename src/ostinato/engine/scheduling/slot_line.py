"""Which request runs with which adapter, and which wait for a slot of theirs.

Note [Adapters and the fair order]
A batch has at most as many different adapters as there are slots. A request that comes to the head of the
queue and finds no slot is set aside, so that others proceed: those without an adapter, and those whose
adapter has a slot. That could go on forever, so at most as many requests as may run at a time pass the first
of those set aside; then no other request with an adapter is admitted until it has its slot. Running requests
end, so a slot becomes free, and it goes to the head of the queue with the next number of the order: from
there on all of Note [Fair order] holds.
"""

from __future__ import annotations

from ..adapters.slots import NO_SLOT, AdapterSlots
from .request import Request
from .request_queue import RequestQueue


class SlotLine:
    """The slots of running requests, and the requests that wait for one."""

    def __init__(self, slots: AdapterSlots | None, max_passed: int) -> None:
        """`slots`: None if no request can have an adapter."""
        self._slots = slots
        self._max_passed = max_passed
        self._num_passed = 0
        self._recalled: Request | None = None
        self.waiting = RequestQueue()
        """Set aside; the first is recalled first."""

    def admits(self, request: Request) -> bool:
        """Whether a request at the head of the queue finds its slot."""
        if request.adapter is None:
            return True
        assert self._slots is not None
        is_held_back = self.waiting and self._num_passed >= self._max_passed
        if is_held_back and request is not self._recalled:
            return False
        return self._slots.can_take(request.adapter)

    def set_aside(self, request: Request) -> None:
        """Let it wait for a slot; if it has run before, it goes first."""
        if request.num_preemptions or request is self._recalled:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def is_due(self, head: Request | None) -> bool:
        """Whether the first of those set aside should go to the head of the queue, which is now `head`."""
        first = self.waiting.first
        if first is None or (head is not None and head is self._recalled):
            return False
        assert self._slots is not None
        assert first.adapter is not None
        return self._slots.can_take(first.adapter)

    def recall(self) -> Request:
        """Take out the first of those set aside."""
        self._recalled = self.waiting.popleft()
        self._num_passed = 0
        return self._recalled

    def remove(self, request: Request) -> None:
        """It has ended."""
        self.waiting.remove(request)

    def move_in(self, request: Request) -> int:
        """Returns its slot, from now on."""
        if request is self._recalled:
            self._recalled = None
        if request.adapter is None:
            return NO_SLOT
        assert self._slots is not None
        self._num_passed += bool(self.waiting)
        return self._slots.take(request.adapter)

    def move_out(self, slot: int) -> None:
        """A request with this slot has left."""
        if slot != NO_SLOT:
            assert self._slots is not None
            self._slots.leave(slot)

    def restore(self, slots: list[int]) -> None:
        """Rebuild the books: requests with these slots run."""
        self.waiting = RequestQueue(request for request in self.waiting if not request.is_finished)
        if self._slots is not None:
            self._slots.restore(slot for slot in slots if slot != NO_SLOT)

    def check_integrity(self, slots: list[int]) -> None:
        """Assert that requests with exactly these slots run."""
        if self._slots is not None:
            self._slots.check_integrity(slot for slot in slots if slot != NO_SLOT)
