"""The requests without a row: those that wait for their turn, and those that stand aside for a reason.

held      came during a drain (`drain.py`)
parked    what may come next is not known yet: a grammar is being compiled
line      no slot is free for their adapter (`slot_line.py`)
turn      all others, oldest first; see Note [Fair order] in scheduler.py
"""

from __future__ import annotations

from ..adapters.slots import AdapterSlots
from .drain import Drain
from .request import Request
from .request_queue import RequestQueue
from .slot_line import SlotLine


class WaitingRequests:
    """Of one scheduler."""

    def __init__(self, slots: AdapterSlots | None, max_running: int) -> None:
        self.turn = RequestQueue()
        """Oldest first; all younger than the running ones."""
        self.parked: dict[Request, None] = {}
        """Requests that can neither run nor wait for their turn: what may come next is not known yet."""
        self.line = SlotLine(slots, max_running)
        """Requests that wait for a slot of their adapter; see Note [Adapters and the fair order]."""
        self.arrivals = Drain()
        """Who came before a drain and who is held until its end; requests that come later announce here."""
        self.head_is_blocked = False
        """Pages come free only when somebody leaves: until then the first in the queue is not tried again."""
        self.num_queued = 0
        """Places in the order that were given out."""

    @property
    def everyone(self) -> tuple[Request, ...]:
        """Wherever they stand."""
        return (*self.turn, *self.line.waiting, *self.parked, *self.arrivals.held)

    @property
    def num_aside(self) -> int:
        """Those that do not wait for their turn."""
        return len(self.parked) + len(self.arrivals.held) + len(self.line.waiting)

    def queue(self, request: Request) -> None:
        """It waits for its turn behind all others, or is held."""
        if request.is_late:
            self.arrivals.held[request] = None
            return
        request.order = self.num_queued
        self.num_queued += 1
        self.turn.append(request)

    def queue_first(self, request: Request) -> None:
        """All that wait are behind it, and get new numbers."""
        behind = list(self.turn)
        self.turn.clear()
        self.head_is_blocked = False
        for each in (request, *behind):
            self.queue(each)

    def take_back(self, request: Request) -> None:
        """One that ran, the youngest of all that did: it is older than all that wait."""
        self.turn.appendleft(request)

    def release(self, request: Request) -> None:
        """A parked one waits for its turn; whoever has run before goes first."""
        del self.parked[request]
        if not request.num_preemptions:
            self.queue(request)
        else:
            self.queue_first(request)

    def end_drain(self, unfinished: tuple[Request, ...]) -> None:
        """Those that were held wait like others."""
        for request in self.arrivals.end(unfinished):
            self.queue(request)

    def remove(self, request: Request) -> None:
        """It has ended, wherever it stands."""
        if request in self.parked:
            del self.parked[request]
        elif request in self.line.waiting:
            self.line.remove(request)
        elif request in self.arrivals.held:
            del self.arrivals.held[request]
        else:
            self.turn.remove(request)
            self.head_is_blocked = False

    def drop_finished(self) -> None:
        """Those that ended while the books were in disorder."""
        self.turn = RequestQueue(request for request in self.turn if not request.is_finished)
        self.parked = {request: None for request in self.parked if not request.is_finished}
        held = self.arrivals.held
        self.arrivals.held = {request: None for request in held if not request.is_finished}
        self.head_is_blocked = False
