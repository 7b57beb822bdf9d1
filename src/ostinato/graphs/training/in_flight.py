"""The calls of a part whose backward is still to come, and the memory that they occupy.

Note [Calls in flight]
What a forward graph saves for its backward must stay until that has run, while any other graph may run.
Memory that a graph shares with others does not: one captured earlier may use it for its intermediates. So
each part has several *places*, and the forward graphs of a place, of all capture sizes, have a pool of their
own. A call occupies a place from its forward until its backward has run, or until nobody holds its results
any more. Backward graphs only read there. They share one pool: their results are copied at once.
"""

import weakref

from ..capturing.pool import Lent
from ..errors import BatchError


class Call:
    """One call of a part that may be differentiated. Held by autograd's graph alone."""

    def __init__(self) -> None:
        self.has_run_backward = False
        self.is_overwritten = False
        self.versions: list[int] = []
        """Of the tensors besides its inputs that its backward reads."""


class _Place:
    """The memory of one call."""

    def __init__(self) -> None:
        self._call: weakref.ref[Call] | None = None
        self.lent = Lent()

    @property
    def call(self) -> Call | None:
        return None if self._call is None else self._call()

    @property
    def is_free(self) -> bool:
        call = self.call
        return call is None or call.has_run_backward

    def take(self, call: Call) -> None:
        before = self.call
        if before is not None:
            before.is_overwritten = True
        self.lent.overwrite()
        self._call = weakref.ref(call)


class InFlight:
    """The places of a part; see Note [Calls in flight]."""

    def __init__(self, part: int, num_places: int) -> None:
        self._part = part
        self._places = [_Place() for _ in range(num_places)]

    def __len__(self) -> int:
        return len(self._places)

    def free_place(self) -> int | None:
        """A place for one more call."""
        return next((i for i, place in enumerate(self._places) if place.is_free), None)

    def begin(self, place: int) -> tuple[Call, Lent]:
        """Call before a forward graph replays into a free place."""
        call = Call()
        self._places[place].take(call)
        return call, self._places[place].lent

    def check(self, call: Call) -> None:
        """Raise BatchError if the memory of a call holds something else by now."""
        if call.is_overwritten:
            raise BatchError(
                f"the backward of part {self._part} runs a second time and too late: a later call has "
                f"overwritten what it needs. Run it before that call, or pass a larger in_flight= to "
                f"make_graphed_callables()"
            )
