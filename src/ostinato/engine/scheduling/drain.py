"""A drain: requests that arrived before it are served to the end, those that arrive during it are held back.

A request may have arrived but not be added yet, because its adapter is still being read. It is announced, and
counts from then on:

    announced = drain.announce()            # when it arrived
    ...                                     # files are read, steps continue
    with drain.arrival(announced):
        scheduler.add(request)              # as if it had been added then
    drain.withdraw(announced)               # if it is not added after all
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .request import Request


class Announced:
    """A request that has arrived and is not added yet."""

    def __init__(self, is_late: bool) -> None:
        self.is_late = is_late
        """Whether it arrived during the current drain."""


class Drain:
    """The drain of one scheduler: the scheduler knows the requests, the drain which of them are late."""

    def __init__(self) -> None:
        self.is_on = False
        self.held: dict[Request, None] = {}
        """Those that arrived since it began, oldest first: they do not even wait for their turn."""
        self._announced: set[Announced] = set()
        self._arriving: Announced | None = None

    def begin(self) -> None:
        """Requests that arrive from now on are late."""
        self.is_on = True

    def end(self, unfinished: Iterable[Request]) -> list[Request]:
        """No request is late any more; returns those that were held."""
        self.is_on = False
        for request in unfinished:
            request.is_late = False
        for announced in self._announced:
            announced.is_late = False
        held, self.held = list(self.held), {}
        return held

    def is_over(self, unfinished: Iterable[Request]) -> bool:
        """Whether all requests that arrived before it have ended."""
        is_served = all(request.is_late for request in unfinished)
        return is_served and all(announced.is_late for announced in self._announced)

    @property
    def is_late(self) -> bool:
        """Whether a request that is added now is late."""
        return self.is_on if self._arriving is None else self._arriving.is_late

    def announce(self) -> Announced:
        """Announce a request that has arrived and will be added later."""
        announced = Announced(self.is_late)
        self._announced.add(announced)
        return announced

    def withdraw(self, announced: Announced) -> None:
        """It will not be added, or has been."""
        self._announced.discard(announced)

    @contextmanager
    def arrival(self, announced: Announced | None, *, is_last: bool = True) -> Iterator[None]:
        """A request added inside counts as arrived when it was announced, if it was; unless it is the last
        one that was announced so, others follow."""
        before, self._arriving = self._arriving, announced or self._arriving
        try:
            yield
        finally:
            self._arriving = before
            if announced is not None and is_last:
                self.withdraw(announced)
