"""An ordered queue from which any request may leave at a cost that does not depend on its length."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from .request import Request


class RequestQueue(OrderedDict[Request, None]):
    """Like a deque of requests, each at most once; finding one costs nothing."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        super().__init__((request, None) for request in requests)

    @property
    def first(self) -> Request | None:
        """The next to leave; None if the queue is empty."""
        return next(iter(self), None)

    def append(self, request: Request) -> None:
        """Add it after all others."""
        self[request] = None

    def appendleft(self, request: Request) -> None:
        """Add it before all others."""
        self[request] = None
        self.move_to_end(request, last=False)

    def popleft(self) -> Request:
        """Take out the first."""
        return self.popitem(last=False)[0]

    def remove(self, request: Request) -> None:
        """Take it out, wherever it is."""
        del self[request]
