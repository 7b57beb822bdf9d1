"""Pages for decoding requests, taken from the youngest request if none is free."""

from __future__ import annotations

import numpy as np

from ostinato.cache.pages import PageAllocator

from .request import IntArray, Request, RequestStatus
from .running_requests import RunningRequests
from .waiting_requests import WaitingRequests


class Preemption:
    """Preemption of one scheduler; see Note [Fair order] in scheduler.py."""

    def __init__(self, pages: PageAllocator, running: RunningRequests, waiting: WaitingRequests) -> None:
        self.count = 0
        """Preemptions since the start."""
        self._pages, self._running, self._waiting = pages, running, waiting

    def grow(self, requests: tuple[Request, ...], rows: IntArray, count: int = 1) -> bool:
        """Give a page to each decoding request without room for `count` tokens, at most a page's worth; if
        none is free, preempt the youngest.

        True if a request was preempted: the decoding requests have then changed.
        """
        running = self._running
        full = running.rows.num_scheduled[rows] + count > running.rows.capacity[rows]
        if not np.count_nonzero(full):
            return False
        growing = [requests[at] for at in np.flatnonzero(full).tolist()]
        if len(growing) <= self._pages.num_free:
            running.taken.grow(growing, len(running.requests))
            return False
        for request in sorted(growing, key=lambda request: request.order):
            # It may have been preempted for an older one, or be the youngest itself.
            while request.row and self._pages.num_free < 1:
                self.preempt(running.requests[-1])
            if request.row:
                running.taken.take(request, 1)
        return True

    def preempt(self, request: Request) -> None:
        """Take row and pages from the youngest running request; it is computed again later."""
        take_row(request, self._running)
        self.count += 1
        self._waiting.take_back(request)


def take_row(request: Request, running: RunningRequests) -> None:
    """Stop running it; it will be computed again from its first token."""
    running.move_out(request)
    request.status = RequestStatus.WAITING
    request.num_preemptions += 1
