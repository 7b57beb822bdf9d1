"""Shares of tenants: whoever has less than others gets a request slot and pages from whoever has most.

Note [Shares of tenants]
Requests may belong to different tenants (`Request.tenant`), each with a weight. While only one tenant has
requests, nothing here happens. Otherwise, before a step is scheduled:

- A waiting request goes before all others if its tenant would still have no more running requests per weight
  than another tenant has after giving up one: (own + 1) / weight <= (other - 1) / weight of the other.
- If no slot is free for it, or too few pages, the youngest running request of the tenant with the most is
  preempted. It is computed again later, mostly from the prefix cache, and waits behind the requests that were
  called, before all others.
- Pages are shared by the same rule, if pages are what is missing. If decoding requests run out of pages, they
  are taken from the tenant with the most pages per weight, from its youngest request.

Each preemption brings the tenants nearer to their shares, so without new arrivals they end. Nobody starves:
only a tenant with more than another one gives up a request, and it keeps its oldest. The oldest request of
all is never preempted for pages unless it runs alone. The order of Note [Fair order] in scheduler.py still
holds, because all waiting requests, the preempted one among them, get new numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from .preemption import Preemption, hungriest
from .request import Request
from .running_requests import RunningRequests
from .waiting_requests import WaitingRequests


class FairShares:
    """Shares of one scheduler's tenants."""

    def __init__(
        self,
        running: RunningRequests,
        waiting: WaitingRequests,
        preemption: Preemption,
        lacking_pages: Callable[[Request], int],
        max_batched_tokens: int,
    ) -> None:
        """`lacking_pages`: how many more free pages a waiting request needs to be admitted now."""
        self._running, self._waiting, self._preemption = running, waiting, preemption
        self._lacking_pages = lacking_pages
        self._max_batched_tokens = max_batched_tokens
        self._comes_again = False

    def make_way(self) -> None:
        """Put requests of tenants with less than their share before all others, with room for them."""
        running, waiting = self._running, self._waiting
        waiting.shares_are_settled, self._comes_again = True, False
        tenants = running.num_of.keys() | waiting.turn.num_of.keys()
        if len(tenants) < 2 or not waiting.turn:
            return
        weights = _weights(running.requests, waiting.turn)
        queues = _queues(waiting.turn)
        called: dict[Request, None] = {}
        counts = Counter(running.num_of)
        preempted: list[Request] = []
        tokens = 0
        while queues:
            tenant = min(queues, key=lambda each: (counts[each] + 1) / weights[each])
            request = queues[tenant].pop()
            tokens += request.num_tokens
            if called and tokens > self._max_batched_tokens:
                break
            found = self._calls(request, counts, weights, running.rows.num_free - len(called), preempted)
            if not found:
                break
            called[request] = None
            counts[tenant] += 1
            if not queues[tenant]:
                del queues[tenant]
            if self._lacking_pages(request) > 0:
                break
        if called or preempted:
            waiting.queue_first(*called, *preempted)
        waiting.shares_are_settled = not self._comes_again

    def _calls(
        self,
        request: Request,
        counts: Counter[str],
        weights: dict[str, float],
        num_free: int,
        preempted: list[Request],
    ) -> bool:
        """Whether a request goes before all others; those that it displaces are preempted."""
        if not self._waiting.line.admits(request):
            return False
        is_entitled = self._gives_slot(request, counts, weights) is not None
        if num_free < 1:
            victim = self._gives_slot(request, counts, weights)
            if victim is None or not self._may_preempt(victim):
                return False
            self._take_from(victim, counts, preempted)
        while self._lacking_pages(request) > 0:
            victim = self._gives_pages(request, weights) or self._gives_slot(request, counts, weights)
            if victim is None or not self._may_preempt(victim):
                break
            self._take_from(victim, counts, preempted)
            is_entitled = True
        return is_entitled

    def _take_from(self, victim: Request, counts: Counter[str], preempted: list[Request]) -> None:
        self._preemption.take_from(victim)
        counts[victim.tenant] -= 1
        preempted.append(victim)

    def _may_preempt(self, victim: Request) -> bool:
        """While the prompt of another request is partly computed, no request can be admitted."""
        if self._running.prefilling in (None, victim):
            return True
        self._comes_again = True
        return False

    def _gives_slot(
        self, request: Request, counts: Counter[str], weights: dict[str, float]
    ) -> Request | None:
        """The request that should give its slot to this one."""
        tenant, running = request.tenant, self._running
        others = [each for each in running.num_of if each != tenant]
        if not others:
            return None
        most = max(others, key=lambda each: counts[each] / weights[each])
        if (counts[tenant] + 1) / weights[tenant] > (counts[most] - 1) / weights[most]:
            return None
        return next((each for each in reversed(running.requests) if each.tenant == most), None)

    def _gives_pages(self, request: Request, weights: dict[str, float]) -> Request | None:
        """The request whose pages this one should get."""
        pages = Counter[str]()
        for each in self._running.requests:
            pages[each.tenant] += len(each.pages)
        victim = hungriest(self._running.requests[1:], pages, weights)
        if victim is None or victim.tenant == request.tenant:
            return None
        own = (pages[request.tenant] + self._lacking_pages(request)) / weights[request.tenant]
        left = (pages[victim.tenant] - len(victim.pages)) / weights[victim.tenant]
        return victim if own <= left else None


def _weights(*places: Iterable[Request]) -> dict[str, float]:
    return {request.tenant: request.weight for requests in places for request in requests}


def _queues(turn: Iterable[Request]) -> dict[str, list[Request]]:
    """The requests of each tenant, those to be taken first at the end."""
    queues: dict[str, list[Request]] = {}
    for request in turn:
        queues.setdefault(request.tenant, []).append(request)
    for queue in queues.values():
        queue.reverse()
    return queues
