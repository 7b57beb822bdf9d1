"""The order in which the parts of a model run, forward and backward.

Note [Rounds]
What a forward graph saves for its backward lies in the shared pool, and so do the intermediates of later
parts. That is sound only in the order of the capture: forward from the first part to the last, backward from
the last to the first, all from graphs of one rung. A round is one such pass. A part called out of order
begins a new round, and the backward of earlier calls is refused, because its memory is overwritten.
"""

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from ..errors import BatchError


class Rounds:
    """Which parts have run forward and not backward yet; see Note [Rounds]."""

    def __init__(self) -> None:
        self._number = 0
        self._rung = 0
        self._open: list[int] = []
        self._lent: list[torch.Tensor] = []

    def rung_for(self, part: int, rung: int | None, rows: int) -> int | None:
        """The rung that a call may use now; None: it must run eagerly."""
        if rung is None or not self._open or part <= self._open[-1]:
            return rung
        return self._rung if rows <= self._rung else None

    def enter(self, part: int, rung: int) -> int:
        """A part runs forward; returns the number of its round."""
        if self._open and part <= self._open[-1]:
            self._begin()
        self._open.append(part)
        self._rung = rung
        return self._number

    def lend(self, outputs: Sequence[torch.Tensor]) -> None:
        """Note results that the next round overwrites."""
        self._lent += outputs

    def leave(self, part: int, number: int) -> None:
        """A part runs backward. Raises BatchError if it is too late for that."""
        if number != self._number or part not in self._open:
            raise BatchError(
                f"the backward of part {part} comes too late, or a second time: what it needs has been "
                f"overwritten. Call the parts in the order of make_graphed_callables, each once"
            )
        del self._open[self._open.index(part) :]
        if not self._open:
            self._begin()

    def _begin(self) -> None:
        self._number += 1
        self._open.clear()
        if self._lent:
            increment_version(self._lent)
            self._lent = []
