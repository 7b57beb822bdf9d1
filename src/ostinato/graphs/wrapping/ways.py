"""By which names code gets at values: what no code mentions, no code reads.

Note [What is never read]
An attribute that no code mentions may hold anything: a trainer's counter, the name of a run. That is so of
objects whose code is read whole, unless some code makes up the names of attributes. A container is read if
one of the ways to it is: by an attribute, by a variable, or inside another one that is.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

BY_ANY_NAME = frozenset(("getattr", "vars", "__dict__", "asdict", "attrgetter"))
"""Code that mentions these may read an attribute whose name it does not mention."""
_Way = tuple[str, bool, bool]
"""An attribute, whether all code that may ask for it is read, and whether its owner is the user's own."""
_BY_VARIABLE: _Way = "", False, True


class Ways:
    """From owners of attributes to values and containers, and from containers to those inside."""

    def __init__(self) -> None:
        self._owners: dict[int, tuple[Any, bool, bool]] = {}
        self._containers: dict[int, Any] = {}
        self._ways: defaultdict[int, list[_Way]] = defaultdict(list)
        self._inside: defaultdict[int, list[int]] = defaultdict(list)

    def add_owner(self, attributes: Any, *, is_read_whole: bool, is_own: bool) -> None:
        """A dictionary of attributes, a class, or an object with slots."""
        self._owners[id(attributes)] = attributes, is_read_whole, is_own

    def add_container(self, container: Any) -> None:
        """What stands in it is reached through it."""
        self._containers[id(container)] = container

    def containers(self) -> set[int]:
        """All of them, by identity."""
        return set(self._containers)

    def lead(self, holder: Any, key: Any, value: Any) -> None:
        """A container stands there."""
        if id(holder) in self._owners:
            _, is_read_whole, is_own = self._owners[id(holder)]
            self._ways[id(value)].append((key, is_read_whole, is_own))
        elif id(holder) in self._containers:
            self._inside[id(holder)].append(id(value))
        else:
            self._ways[id(value)].append(_BY_VARIABLE)

    def readable(self, names: Collection[str]) -> Callable[[Any, Any], bool]:
        """Tells whether code that mentions these names may read what stands at a place."""
        if not BY_ANY_NAME.isdisjoint(names):
            return lambda holder, key: True
        read = self._reached(lambda name, is_read_whole, is_own: not is_read_whole or name in names)

        def may_read(holder: Any, key: Any) -> bool:
            if id(holder) in self._owners:
                return not self._owners[id(holder)][1] or key in names
            return id(holder) not in self._containers or id(holder) in read

        return may_read

    def growing(self, names: Collection[str]) -> list[Any]:
        """Containers in which code that mentions these names would see a new entry."""
        found = self._reached(lambda name, is_read_whole, is_own: not name or name in names)
        return [container for key, container in self._containers.items() if key in found]

    def _reached(self, leads: Callable[[str, bool, bool], bool]) -> set[int]:
        found = {key for key, ways in self._ways.items() if any(leads(*way) for way in ways)}
        ahead = list(found)
        while ahead:
            new = set(self._inside.get(ahead.pop(), ())) - found
            found |= new
            ahead += new
        return found
