"""An ordered queue from which any request may leave at a cost that does not depend on its length."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from .request import Request


class RequestQueue(OrderedDict[Request, None]):
    """Like a deque of requests, each at most once; finding one costs nothing."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self.num_of: Counter[str] = Counter()
        """Its requests by tenant; those without any are not in it."""
        super().__init__()
        for request in requests:
            self.append(request)

    @property
    def first(self) -> Request | None:
        """The next to leave; None if the queue is empty."""
        return next(iter(self), None)

    def append(self, request: Request) -> None:
        """Add it after all others."""
        assert request not in self
        self[request] = None
        self.num_of[request.tenant] += 1

    def appendleft(self, request: Request) -> None:
        """Add it before all others."""
        self.append(request)
        self.move_to_end(request, last=False)

    def popleft(self) -> Request:
        """Take out the first."""
        request = self.popitem(last=False)[0]
        self._uncount(request)
        return request

    def remove(self, request: Request) -> None:
        """Take it out, wherever it is."""
        del self[request]
        self._uncount(request)

    def clear(self) -> None:
        """Take out all."""
        super().clear()
        self.num_of.clear()

    def _uncount(self, request: Request) -> None:
        tenant = request.tenant
        if self.num_of[tenant] == 1:
            del self.num_of[tenant]
        else:
            self.num_of[tenant] -= 1
