"""A drain: whoever came before it is served to the end, whoever comes while it lasts is held back.

A request may have come and not be there yet, because its adapter is still being read. It is announced, and
counts from then on:

    announced = drain.announce()            # when it came
    ...                                     # files are read, steps go on
    with drain.arrival(announced):
        scheduler.add(request)              # as if it had been added then
    drain.withdraw(announced)               # if it is not added after all
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .request import Request


class Announced:
    """A request that has come and is not added yet."""

    def __init__(self, is_late: bool) -> None:
        self.is_late = is_late
        """Whether it came during the drain that is in force."""


class Drain:
    """Of one scheduler; the scheduler knows the requests, this one who of them is late."""

    def __init__(self) -> None:
        self.is_on = False
        self.held: dict[Request, None] = {}
        """Those that came since it began, oldest first: they do not even wait for their turn."""
        self._announced: set[Announced] = set()
        self._arriving: Announced | None = None

    def begin(self) -> None:
        """Whoever comes from now on is late."""
        self.is_on = True

    def end(self, unfinished: Iterable[Request]) -> list[Request]:
        """Nobody is late any more; those that were held."""
        self.is_on = False
        for request in unfinished:
            request.is_late = False
        for announced in self._announced:
            announced.is_late = False
        held, self.held = list(self.held), {}
        return held

    def is_over(self, unfinished: Iterable[Request]) -> bool:
        """Whether all have ended that came before it began."""
        is_served = all(request.is_late for request in unfinished)
        return is_served and all(announced.is_late for announced in self._announced)

    @property
    def is_late(self) -> bool:
        """Whether a request that is added now is late."""
        return self.is_on if self._arriving is None else self._arriving.is_late

    def announce(self) -> Announced:
        """A request has come that will be added later."""
        announced = Announced(self.is_on)
        self._announced.add(announced)
        return announced

    def withdraw(self, announced: Announced) -> None:
        """It will not be added, or has been."""
        self._announced.discard(announced)

    @contextmanager
    def arrival(self, announced: Announced | None) -> Iterator[None]:
        """What is added in here came when it was announced, if it was."""
        self._arriving = announced
        try:
            yield
        finally:
            self._arriving = None
            if announced is not None:
                self.withdraw(announced)
