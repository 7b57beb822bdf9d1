"""Whether things stand where they stood: one expression, compiled when the places are known.

Before every replay of a training step hundreds of places are looked at. Code that names each of them takes a
fraction of what a loop over them does.
"""

import types
from collections.abc import Callable, Iterable
from typing import Any

from .holders import item_of

Place = tuple[Any, Any, Any]
"""A holder, a place in it, and what stands there."""


class Comparison:
    """Terms that all have to hold; `compiled()` tells whether they do."""

    def __init__(self) -> None:
        self._terms: list[str] = []
        self._named: dict[str, Any] = {"item_of": item_of}
        self._names: dict[int, str] = {}
        self._of_classes: dict[type, Any] = {}

    def add_places(self, places: Iterable[Place]) -> None:
        """The same object stands there."""
        for holder, key, value in places:
            if not isinstance(holder, tuple):
                self._terms.append(f"{self._look(holder, key)} is {self._name(value)}")

    def add_empty(self, holder: dict[Any, Any], key: str) -> None:
        """A container that is empty."""
        self._terms.append(f"not {self._name(holder)}[{key!r}]")

    def add_missing(self, holder: dict[Any, Any], key: str) -> None:
        """Nothing stands there."""
        self._terms.append(f"{key!r} not in {self._name(holder)}")

    def add_equal(self, question: Callable[[], Any]) -> None:
        """It has the answer that it has now."""
        self._terms.append(f"{self._name(question)}() == {self._name(question())}")

    def compiled(self) -> Callable[[], bool]:
        """Whether all terms hold. What is gone does not stand where it stood."""
        # Arguments with defaults: the fastest names that there are.
        text = f"lambda {', '.join(self._named)}: {' and '.join(self._terms) or 'True'}"
        holds = eval(compile(text, "<comparison>", "eval"), {})
        holds.__defaults__ = tuple(self._named.values())

        def still() -> bool:
            try:
                return bool(holds())
            except (LookupError, AttributeError, ReferenceError, RuntimeError, ValueError):
                return False

        return still

    def _look(self, holder: Any, key: Any) -> str:
        name = self._name(holder)
        if isinstance(holder, type):
            name = self._name(self._of_classes.setdefault(holder, vars(holder)))
        if type(holder) in (dict, list) or isinstance(holder, type):
            return f"{name}[{repr(key) if type(key) in (str, int) else self._name(key)}]"
        if isinstance(holder, types.CellType):
            return f"{name}.cell_contents"
        return f"item_of({name}, {self._name(key)})"

    def _name(self, value: Any) -> str:
        """How the expression calls an object, which it thereby holds."""
        if id(value) not in self._names:
            self._names[id(value)] = name = f"o{len(self._names)}"
            self._named[name] = value
        return self._names[id(value)]
