"""Numbers and settings in Python that a captured step has baked in: a chance of dropout, a weight of a loss.

A replay runs no Python, so a value that was changed since the capture would be ignored without a word. Before
every replay all that model and loss function reach is compared, by identity first: a few ten microseconds.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..wrapping.reached import Key, Reached

logger = logging.getLogger("ostinato.graphs")


class PythonValues:
    """What a model and a loss function look at besides tensors."""

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self._own: set[Key] = set()
        """What a step assigns itself."""
        self._captured: Reached | None = None
        self._has_warned = False

    @contextmanager
    def first_step(self) -> Iterator[None]:
        """Around a step: what is assigned in it, it assigns itself."""
        before = Reached(*self._roots)
        yield
        self._own |= before.changed()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Around trial runs: they count for nothing."""
        before = Reached(*self._roots)
        try:
            yield
        finally:
            before.put_back(before.changed())

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Around a capture: from here on, what was not assigned by the step itself has to stay as it is."""
        before = Reached(*self._roots)
        yield
        assigned = before.changed_values()
        before.put_back(self._own)
        if assigned:
            logger.warning(
                "every step assigns %s in Python: a replay runs no Python, leaves it as it is, and goes on "
                "with the value of the capture. Keep it in a buffer if it matters",
                ", ".join(assigned[:5]),
            )
        self.note()

    def note(self) -> None:
        """As it is now is as graphs have it."""
        self._captured = Reached(*self._roots, ignored=self._own)

    def have_changed(self) -> bool:
        """Whether a replay would do something else than the step as it is now."""
        reached = self._captured
        if reached is None:
            return False
        changed = reached.changed_values()
        if not changed and reached.is_same_code():
            return False
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "steps run eagerly while %s is not as at the capture: a graph would go on with what it was. "
                "Keep what changes in a tensor, or pass it as an input",
                ", ".join(changed[:5]) or "a hook or method of a module",
            )
        return True
