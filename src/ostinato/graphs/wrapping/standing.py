"""Whether things stand where they stood: a few comparisons in C, arranged when the places are known.

Most of it is in dictionaries, which are looked into only if they have changed, see Note [Versions of
dictionaries] in words.py.

Note [Shapes under another mode]
torch's guards of tensors compare sizes, strides, types and dispatch keys of all tensors at once. Keys depend
on the mode of the thread (inference mode, autocast), so there is one set of guards for each that was seen.
"""

import gc
import types
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, le
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards

from .holders import MISSING, WHOLE, item_of
from .words import Words

Place = tuple[Any, Any, Any]
"""A holder, a place in it, and what stands there."""

_address, _size, _stride = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride
_attributes_of = object.__getattribute__
_dtype, _contents = attrgetter("dtype"), attrgetter("cell_contents")
_MOST_MODES = 4
_MOST_EQUAL_CHANGES = 8


class Comparison:
    """Terms that all have to hold; `compiled()` tells whether they do."""

    def __init__(self) -> None:
        self._dicts: dict[int, _Dictionary] = {}
        self._objects: list[Any] = []
        self._lists: dict[int, tuple[list[Any], dict[int, Any]]] = {}
        self._sets: dict[int, tuple[set[Any], set[Any]]] = {}
        self._wholes: list[tuple[Any, tuple[Any, ...]]] = []
        self._sizes: list[tuple[Any, int]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._others: list[Place] = []
        self._attributes: list[tuple[Any, dict[str, Any]]] = []
        self._questions: list[tuple[Callable[[], Any], Any]] = []
        self._tensors: list[torch.Tensor] = []

    def add_places(self, places: Iterable[Place]) -> None:
        """The same object stands there."""
        for holder, key, value in places:
            if key is WHOLE and not isinstance(holder, dict):
                self._wholes.append((holder, value))
            elif isinstance(holder, dict | type):
                self._dictionary(holder).places.append((key, value))
            elif type(holder) is list and type(key) is int:
                self._lists.setdefault(id(holder), (holder, {}))[1][key] = value
            elif type(holder) is set and value is True:
                self._sets.setdefault(id(holder), (holder, set()))[1].add(key)
            elif isinstance(holder, types.CellType) and item_of(holder, key) is not None:
                self._cells.append((holder, value))
            elif not isinstance(holder, tuple):
                self._others.append((holder, key, value))

    def add_empty(self, holder: dict[Any, Any]) -> None:
        """A dictionary that is empty."""
        self._dictionary(holder).size = 0

    def add_missing(self, holder: dict[Any, Any], key: str) -> None:
        """Nothing stands there."""
        self._dictionary(holder).places.append((key, MISSING))

    def add_size(self, holder: Any) -> None:
        """It has as many entries as now."""
        if isinstance(holder, dict):
            self._dictionary(holder).size = len(holder)
        else:
            self._sizes.append((holder, len(holder)))

    def add_types(self, objects: Iterable[Any]) -> None:
        """They are of the classes that they are of."""
        self._objects += objects

    def add_attributes(self, holder: Any) -> None:
        """The dictionary of its attributes is the one that it is now."""
        own = vars(holder)
        try:
            is_its_own = _attributes_of(holder, "__dict__") is own
        except AttributeError:  # a `threading.local` has one for each thread
            is_its_own = False
        if is_its_own:
            self._attributes.append((holder, own))
        else:
            self.add_equal(lambda: id(vars(holder)))

    def add_equal(self, question: Callable[[], Any]) -> None:
        """It has the answer that it has now."""
        self._questions.append((question, question()))

    def add_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """They are where they are, with the shapes and types that they have."""
        self._tensors += {id(tensor): tensor for tensor in tensors}.values()

    def compiled(self) -> Callable[[], bool]:
        """Tells whether all terms hold. What is gone does not stand where it stood."""
        whole = [entry for entry in self._lists.values() if len(entry[1]) == len(entry[0])]
        for holder, entries in self._lists.values():
            if len(entries) != len(holder):
                self._others += [(holder, key, value) for key, value in entries.items()]
        self._sizes += [(holder, len(holder)) for holder, _ in whole]
        lists = [holder for holder, _ in whole]
        elements = [entries[key] for _, entries in whole for key in range(len(entries))]
        sized, sizes = [list(column) for column in zip(*self._sizes, strict=True)] or ([], [])
        cells, contents = [list(column) for column in zip(*self._cells, strict=True)] or ([], [])
        holders, keys, values = [list(column) for column in zip(*self._others, strict=True)] or ([], [], [])
        whose, attributes = [list(column) for column in zip(*self._attributes, strict=True)] or ([], [])
        sets, present = [list(column) for column in zip(*self._sets.values(), strict=True)] or ([], [])
        questions, answers = [list(column) for column in zip(*self._questions, strict=True)] or ([], [])
        wholes = self._wholes
        terms: list[tuple[Any, Callable[[], bool]]] = [
            (sized, lambda: list(map(len, sized)) == sizes),
            (lists, lambda: all(map(is_, chain.from_iterable(lists), elements))),
            (cells, lambda: all(map(is_, map(_contents, cells), contents))),
            (holders, lambda: all(map(is_, map(item_of, holders, keys), values))),
            (sets, lambda: all(map(le, present, sets))),
            (wholes, lambda: all(_is_whole(holder, entries) for holder, entries in wholes)),
            (whose, lambda: all(map(is_, map(_attributes_of, whose, repeat("__dict__")), attributes))),
            (questions, lambda: [question() for question in questions] == answers),
        ]
        in_memory = _InMemory(list(self._dicts.values()), self._objects, self._tensors)
        others = [holds for about, holds in terms if about]

        def still() -> bool:
            try:
                if not in_memory.hold():
                    return False
                for holds in others:
                    if not holds():
                        return False
            except (LookupError, AttributeError, ReferenceError, RuntimeError, ValueError):
                return False
            return True

        return still

    def _dictionary(self, holder: Any) -> "_Dictionary":
        if isinstance(holder, type):
            holder = gc.get_referents(vars(holder))[0]  # what the view of a class's attributes is a view of
        return self._dicts.setdefault(id(holder), _Dictionary(holder))


class _Dictionary:
    """The places of one that count, and its size if that does."""

    def __init__(self, holder: dict[Any, Any]) -> None:
        self.holder = holder
        self.places: list[tuple[Any, Any]] = []
        self.size: int | None = None

    def holds(self) -> bool:
        """Returns whether they stand."""
        find = self.holder.get
        return (self.size is None or len(self.holder) == self.size) and all(
            _is_whole(self.holder, value) if key is WHOLE else find(key, MISSING) is value
            for key, value in self.places
        )


class _InMemory:
    """Dictionaries, objects that are to keep their class, and tensors: what words of memory tell of."""

    def __init__(
        self, dictionaries: list[_Dictionary], objects: list[Any], tensors: list[torch.Tensor]
    ) -> None:
        self._dictionaries, self._objects, self._tensors = dictionaries, objects, tensors
        self._types = list(map(type, objects))
        self._geometry = _Geometry(tensors)
        self._num_equal_changes = 0
        self._look()

    def _look(self) -> None:
        """Take what is there now for right."""
        self._words = Words([each.holder for each in self._dictionaries], self._objects, self._tensors)
        self._unread = _Geometry(self._words.unread) if self._words.unread else None

    def hold(self) -> bool:
        """Returns whether all places stand and all tensors are as they were."""
        words = self._words
        if not words.are_same() and not self._hold_one_by_one(words):
            return False
        return self._unread is None or self._unread.holds()

    def _hold_one_by_one(self, words: Words) -> bool:
        if list(map(type, self._objects)) != self._types:
            return False
        known = len(self._dictionaries)
        if not all(self._dictionaries[number].holds() for number in words.changed() if number < known):
            return False
        if words.have_tensors_changed():
            if not self._geometry.holds():
                return False
            if self._num_equal_changes < _MOST_EQUAL_CHANGES:  # an equal tensor of C++ has taken one's place
                self._num_equal_changes += 1
                self._look()
                return True
        words.accept()
        return True


class _Geometry:
    """Addresses, sizes, strides and types of tensors, as these tell them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors, self._addresses = tensors, list(map(_address, tensors))
        self._shapes = _Shapes(tensors)

    def holds(self) -> bool:
        """Returns whether all are as they were."""
        return list(map(_address, self._tensors)) == self._addresses and self._shapes.hold()


class _Shapes:
    """Sizes, strides and types of tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors, self._then = tensors, _shapes_of(tensors)
        self._guards = [_guards_of(tensors)] if tensors else []

    def hold(self) -> bool:
        """Returns whether all are as they were, see Note [Shapes under another mode]."""
        if not self._tensors or any(guards.check(*self._tensors) for guards in self._guards):
            return True
        if _shapes_of(self._tensors) != self._then:
            return False
        self._guards = [_guards_of(self._tensors), *self._guards[: _MOST_MODES - 1]]
        return True


def _is_whole(holder: Any, entries: Any) -> bool:
    """Returns whether it has exactly these entries."""
    is_same = len(holder) == len(entries) and all(map(is_, holder, entries))
    return is_same and (not isinstance(holder, dict) or all(map(is_, holder.values(), entries.values())))


def _guards_of(tensors: list[torch.Tensor]) -> TensorGuards:
    sizes, strides = ([list(question(tensor)) for tensor in tensors] for question in (_size, _stride))
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]


def _shapes_of(tensors: list[torch.Tensor]) -> list[list[Any]]:
    return [list(map(question, tensors)) for question in (_size, _stride, _dtype)]
