"""Pages for decoding requests, taken from the youngest request if none is free; of several tenants, from the
youngest of the one with the most pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

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
        none is free, preempt the youngest; Note [Shares of tenants] in fair_shares.py.

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
                self.preempt(self._victim())
            if request.row:
                running.taken.take(request, 1)
        return True

    def preempt(self, request: Request) -> None:
        """Take row and pages from a running request; it is computed again later, before all that wait."""
        is_youngest = request is self._running.requests[-1]
        self.take_from(request)
        if is_youngest:
            self._waiting.take_back(request)
        else:
            self._waiting.queue_first(request)

    def take_from(self, request: Request) -> None:
        """The same, but the caller queues it."""
        take_row(request, self._running)
        self.count += 1

    def _victim(self) -> Request:
        requests = self._running.requests
        if len(self._running.num_of) == 1:
            return requests[-1]
        pages = Counter[str]()
        for request in requests:
            pages[request.tenant] += len(request.pages)
        weights = {request.tenant: request.weight for request in requests}
        return hungriest(requests[1:], pages, weights) or requests[-1]


def hungriest(
    requests: Sequence[Request], pages: Mapping[str, int], weights: Mapping[str, float]
) -> Request | None:
    """The youngest of these requests, oldest first, whose tenant has the most pages per weight."""
    tenants = {request.tenant for request in requests}
    if not tenants:
        return None
    most = max(tenants, key=lambda tenant: (pages[tenant] / weights[tenant], tenant))
    return next(request for request in reversed(requests) if request.tenant == most)


def take_row(request: Request, running: RunningRequests) -> None:
    """Stop running it; it will be computed again from its first token."""
    running.move_out(request)
    request.status = RequestStatus.WAITING
    request.num_preemptions += 1
