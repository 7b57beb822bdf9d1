"""Requests in an order, of which any may leave: a client that goes is no matter of how many wait."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from .request import Request


class RequestQueue(OrderedDict[Request, None]):
    """As a deque of requests, each of them once; where in it one stands costs nothing to find."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        super().__init__((request, None) for request in requests)

    @property
    def first(self) -> Request | None:
        """Who leaves next; None if nobody is there."""
        return next(iter(self), None)

    def append(self, request: Request) -> None:
        """Behind all others."""
        self[request] = None

    def appendleft(self, request: Request) -> None:
        """Before all others."""
        self[request] = None
        self.move_to_end(request, last=False)

    def popleft(self) -> Request:
        """Take out the first."""
        return self.popitem(last=False)[0]

    def remove(self, request: Request) -> None:
        """Take it out, wherever it stands."""
        del self[request]
