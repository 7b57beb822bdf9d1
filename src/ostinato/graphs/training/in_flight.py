"""The calls of parts whose backward is still to come, and the memory that they occupy.

Note [Calls in flight]
What a forward graph saves for its backward lies in memory to which no other graph of the same level writes:
all forward graphs are recorded, and then all backward graphs, while everything that is saved stays alive.
Each part has such memory several times, in *places*. So parts may be called, and differentiated, in any
order. A call occupies its place from its forward until its backward has run, or until nobody holds its
results any more.

A level has one capture size of each part. Smaller levels lie in the memory of larger ones, so all calls in
flight are of one level. Other graphs that share the pool may write anywhere.
"""

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch.autograd.graph import increment_version

from ..capturing.pool import GraphPool
from ..errors import BatchError


class Call:
    """One call of a part that may be differentiated. Held by autograd's graph alone."""

    def __init__(self, part: int) -> None:
        self.part = part
        self.has_run_backward = False
        self.lost: str | None = None
        """Why its memory holds something else by now."""
        self.versions: list[int] = []
        """Of the tensors besides its inputs that its backward reads."""


class Lease:
    """Results in the memory of a place. Stands for a pool where results are guarded."""

    def __init__(self) -> None:
        self.generation = 0
        self._outputs: Sequence[torch.Tensor] = ()

    def give_out(self, outputs: Sequence[torch.Tensor]) -> None:
        """Note results that lie there, by aliases that do not hold their history."""
        self._outputs = outputs

    def end(self) -> None:
        """Call before they are overwritten: whoever uses them later is told."""
        self.generation += 1
        if self._outputs:
            increment_version(self._outputs)
            self._outputs = ()


class _Place:
    """The memory of one call of one part."""

    def __init__(self) -> None:
        self._call: weakref.ref[Call] | None = None
        self.lease = Lease()

    @property
    def call(self) -> Call | None:
        return None if self._call is None else self._call()

    @property
    def is_free(self) -> bool:
        call = self.call
        return call is None or call.has_run_backward or call.lost is not None

    def lose(self, why: str) -> None:
        """Somebody is about to write there."""
        self.lease.end()
        call = self.call
        if call is not None:
            call.lost = call.lost or why

    def take(self, call: Call) -> None:
        self._call = weakref.ref(call)


class InFlight:
    """The places of the parts of one `make_graphed_callables`; see Note [Calls in flight]."""

    def __init__(self, pool: GraphPool, num_parts: int, num_places: int) -> None:
        self._pool = pool
        self._generation = pool.generation
        self._places = [[_Place() for _ in range(num_places)] for _ in range(num_parts)]
        self.num_places = num_places
        self.level = 0
        """The level of the last call. While calls are in flight, others must be of this level, too."""

    def is_any(self) -> bool:
        """Whether a call of any part is in flight."""
        return any(not place.is_free for place in self._all())

    def free_place(self, part: int) -> int | None:
        """A place for one more call of a part."""
        return next((i for i, place in enumerate(self._places[part]) if place.is_free), None)

    def begin(self, part: int, place: int, level: int) -> tuple[Call, Lease]:
        """Call before a forward graph replays into a free place."""
        self._notice_others()
        if level != self.level:
            self._lose_all("a call with another number of rows")
            self.level = level
        taken, call = self._places[part][place], Call(part)
        taken.lose("a later call")
        taken.take(call)
        self.overwrite()
        return call, taken.lease

    def check(self, call: Call) -> None:
        """Raise BatchError if the memory of a call holds something else by now."""
        self._notice_others()
        if call.lost is None:
            return
        second = " a second time" if call.has_run_backward else ""
        raise BatchError(
            f"the backward of part {call.part} comes too late: {call.lost} has overwritten what it needs. "
            + (
                f"To run it{second}, run it before that call, or pass a larger in_flight= to "
                f"make_graphed_callables()"
                if second
                else "Replay no other graph of a shared pool between the forward and the backward of a part, "
                "or let them use pools of their own"
            )
        )

    def overwrite(self) -> None:
        """Call before one of the parts' graphs replays, which writes to no place but its own."""
        self._pool.overwrite()
        self._generation = self._pool.generation

    def settle(self) -> None:
        """Call when everything is recorded."""
        self._generation = self._pool.generation

    def _notice_others(self) -> None:
        if self._pool.generation != self._generation:
            self._generation = self._pool.generation
            self._lose_all("another graph in the same pool")

    def _lose_all(self, why: str) -> None:
        for place in self._all():
            place.lose(why)

    def _all(self) -> Iterator[_Place]:
        for places in self._places:
            yield from places
