"""The requests without a row: those that wait for their turn, and those set aside for a reason.

held      arrived during a drain (`drain.py`)
parked    their next tokens are not known yet: a grammar is being compiled
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
    """The waiting requests of one scheduler."""

    def __init__(self, slots: AdapterSlots | None, max_running: int) -> None:
        self.turn = RequestQueue()
        """Oldest first; all younger than the running ones."""
        self.parked: dict[Request, None] = {}
        """Requests that can neither run nor wait for their turn: their next tokens are not known yet."""
        self.line = SlotLine(slots, max_running)
        """Requests that wait for a slot of their adapter; see Note [Adapters and the fair order]."""
        self.arrivals = Drain()
        """The current drain: which requests are late, which are held; later ones are announced here."""
        self.head_is_blocked = False
        """Pages become free only when a request leaves; until then the first in the queue is not retried."""
        self.shares_are_settled = True
        """Nobody has begun to run or to wait since tenants' shares were last looked at."""
        self.num_queued = 0
        """Places in the order that were given out."""

    @property
    def everyone(self) -> tuple[Request, ...]:
        """All of them, wherever they are."""
        return (*self.turn, *self.line.waiting, *self.parked, *self.arrivals.held)

    @property
    def num_aside(self) -> int:
        """Those that do not wait for their turn."""
        return len(self.parked) + len(self.arrivals.held) + len(self.line.waiting)

    def queue(self, request: Request) -> None:
        """Let it wait for its turn after all others, or hold it."""
        if request.is_late:
            self.arrivals.held[request] = None
            return
        request.order = self.num_queued
        self.num_queued += 1
        self.turn.append(request)
        self.shares_are_settled = False

    def queue_first(self, *requests: Request) -> None:
        """Put these before all that wait, if they do not wait yet; all get new numbers."""
        first = dict.fromkeys(requests)
        behind = [each for each in self.turn if each not in first]
        self.turn.clear()
        self.head_is_blocked = False
        for each in (*first, *behind):
            self.queue(each)

    def take_back(self, request: Request) -> None:
        """Queue a request that ran, the youngest of all that did: it is older than all that wait."""
        self.turn.appendleft(request)
        self.shares_are_settled = False

    def release(self, request: Request) -> None:
        """Let a parked request wait for its turn; one that has run before goes first."""
        del self.parked[request]
        if not request.num_preemptions:
            self.queue(request)
        else:
            self.queue_first(request)

    def end_drain(self, unfinished: tuple[Request, ...]) -> None:
        """Queue the requests that were held."""
        for request in self.arrivals.end(unfinished):
            self.queue(request)

    def remove(self, request: Request) -> None:
        """It has ended, wherever it is."""
        if request in self.parked:
            del self.parked[request]
        elif request in self.line.waiting:
            self.line.remove(request)
        elif request in self.arrivals.held:
            del self.arrivals.held[request]
        else:
            self.turn.remove(request)
            self.head_is_blocked = self.shares_are_settled = False

    def drop_finished(self) -> None:
        """Remove requests that ended while the books were inconsistent."""
        self.turn = RequestQueue(request for request in self.turn if not request.is_finished)
        self.parked = {request: None for request in self.parked if not request.is_finished}
        held = self.arrivals.held
        self.arrivals.held = {request: None for request in held if not request.is_finished}
        self.head_is_blocked = self.shares_are_settled = False
