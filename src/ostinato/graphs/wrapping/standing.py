"""Whether things stand where they stood: a few comparisons in C, arranged when the places are known.

Note [Versions of dictionaries]
CPython numbers every change of a dictionary, and torch's compiler can read the number. A dictionary whose
number is the same holds what it held, however many places in it count, and most places are in dictionaries:
attributes of modules and objects, tables of parameters, namespaces. Where the number is another, the places
are compared, and if they hold, the new number is remembered.

Note [Shapes under another mode]
torch's guards of tensors compare sizes, strides, types and dispatch keys of all tensors at once. Keys depend
on the mode of the thread (inference mode, autocast), so there is one set of guards for each that was seen.
"""

import gc
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, compress
from operator import attrgetter, is_, ne, not_
from typing import Any

import torch
from torch._C._dynamo.guards import RootGuardManager, TensorGuards, dict_version

from .holders import MISSING, WHOLE, item_of

Place = tuple[Any, Any, Any]
"""A holder, a place in it, and what stands there."""

_address, _size, _stride = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride
_dtype, _contents = attrgetter("dtype"), attrgetter("cell_contents")
_MOST_MODES = 4
_MOST_IN_ONE = 128
"""Dictionaries in one guard, which is made anew when one of them changes."""


class Comparison:
    """Terms that all have to hold; `compiled()` tells whether they do."""

    def __init__(self) -> None:
        self._dicts: dict[int, _Dictionary] = {}
        self._empty: list[Any] = []
        self._lists: dict[int, tuple[list[Any], dict[int, Any]]] = {}
        self._wholes: list[tuple[Any, tuple[Any, ...]]] = []
        self._sizes: list[tuple[Any, int]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._others: list[Place] = []
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
            elif isinstance(holder, types.CellType) and item_of(holder, key) is not None:
                self._cells.append((holder, value))
            elif not isinstance(holder, tuple):
                self._others.append((holder, key, value))

    def add_empty(self, holder: dict[Any, Any]) -> None:
        """A container that is empty."""
        self._empty.append(holder)

    def add_missing(self, holder: dict[Any, Any], key: str) -> None:
        """Nothing stands there."""
        self._dictionary(holder).places.append((key, MISSING))

    def add_size(self, holder: Any) -> None:
        """It has as many entries as now."""
        if isinstance(holder, dict) and not holder:
            self._empty.append(holder)
        elif isinstance(holder, dict):
            self._dictionary(holder).size = len(holder)
        else:
            self._sizes.append((holder, len(holder)))

    def add_equal(self, question: Callable[[], Any]) -> None:
        """It has the answer that it has now."""
        self._questions.append((question, question()))

    def add_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """They are where they are, with the shapes and types that they have."""
        self._tensors += {id(tensor): tensor for tensor in tensors}.values()

    def compiled(self) -> Callable[[], bool]:
        """Whether all terms hold. What is gone does not stand where it stood."""
        dictionaries = _Dictionaries(list(self._dicts.values()))
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
        wholes = self._wholes
        empty, questions = list({id(each): each for each in self._empty}.values()), self._questions
        addresses, shapes = list(map(_address, self._tensors)), _Shapes(self._tensors)
        tensors = self._tensors

        def still() -> bool:
            try:
                return (
                    dictionaries.hold()
                    and not any(empty)
                    and list(map(_address, tensors)) == addresses
                    and shapes.hold()
                    and list(map(len, sized)) == sizes
                    and all(map(is_, chain.from_iterable(lists), elements))
                    and all(map(is_, map(_contents, cells), contents))
                    and all(map(is_, map(item_of, holders, keys), values))
                    and all(_is_whole(holder, entries) for holder, entries in wholes)
                    and all(question() == answer for question, answer in questions)
                )
            except (LookupError, AttributeError, ReferenceError, RuntimeError, ValueError):
                return False

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
        """Whether they stand."""
        find = self.holder.get
        return (self.size is None or len(self.holder) == self.size) and all(
            _is_whole(self.holder, value) if key is WHOLE else find(key, MISSING) is value
            for key, value in self.places
        )


class _Dictionaries:
    """Many of them, see Note [Versions of dictionaries]."""

    def __init__(self, all_of_them: list[_Dictionary]) -> None:
        starts = range(0, len(all_of_them), _MOST_IN_ONE)
        self._quiet = [_Quiet(all_of_them[start : start + _MOST_IN_ONE]) for start in starts]
        self._restless: list[_Dictionary] = []
        self._holders: list[dict[Any, Any]] = []
        self._versions: list[int] = []

    def hold(self) -> bool:
        """Whether all places stand. What changes although nothing that counts does is looked at by itself
        from then on."""
        for quiet in self._quiet:
            if not quiet.stands():
                if (moved := quiet.give_up_moved()) is None:
                    return False
                self._restless += moved
                self._holders += [each.holder for each in moved]
                self._versions += [dict_version(each.holder) for each in moved]
        now = list(map(dict_version, self._holders))
        if now != self._versions:
            changed = map(ne, now, self._versions)
            if not all(each.holds() for each in compress(self._restless, changed)):
                return False
            self._versions = now
        return True


class _Quiet:
    """Some that have not changed so far."""

    def __init__(self, members: list[_Dictionary]) -> None:
        self._members = members
        self._note()

    def _note(self) -> None:
        self._holders = tuple(each.holder for each in self._members)
        self._versions = list(map(dict_version, self._holders))
        self._check = _guard(self._holders)

    def stands(self) -> bool:
        """Whether that is still so."""
        return self._check(self._holders)

    def give_up_moved(self) -> list[_Dictionary] | None:
        """Those that changed in nothing that counts, from now on without them; None if there are others."""
        now = map(dict_version, self._holders)
        changed = [v != was for v, was in zip(now, self._versions, strict=True)]
        moved = list(compress(self._members, changed))
        if not all(each.holds() for each in moved):
            return None
        self._members = list(compress(self._members, map(not_, changed)))
        self._note()
        return moved


def _guard(holders: tuple[dict[Any, Any], ...]) -> Callable[[Any], bool]:
    """Tells whether the numbers are as now: by guards of torch's compiler if that is loaded, which need a
    sixth of the time; to load it takes seconds."""
    dynamo = sys.modules.get("torch._dynamo.guards")
    if dynamo is None:
        versions = list(map(dict_version, holders))
        return lambda these: list(map(dict_version, these)) == versions
    root, kind = RootGuardManager(), dynamo.GuardManagerType.GUARD_MANAGER
    for number, holder in enumerate(holders):
        entry = root.tuple_getitem_manager(number, str(number), holder, kind)
        entry.add_dict_version_guard(holder, [""], None)
    check: Callable[[Any], bool] = root.check
    return check


class _Shapes:
    """Sizes, strides and types of tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors, self._then = tensors, _shapes_of(tensors)
        self._guards = [_guards_of(tensors)] if tensors else []

    def hold(self) -> bool:
        """Whether all are as they were, see Note [Shapes under another mode]."""
        if any(guards.check(*self._tensors) for guards in self._guards) or not self._tensors:
            return True
        if _shapes_of(self._tensors) != self._then:
            return False
        self._guards = [_guards_of(self._tensors), *self._guards[: _MOST_MODES - 1]]
        return True


def _is_whole(holder: Any, entries: Any) -> bool:
    """Whether it has exactly these entries."""
    is_same = len(holder) == len(entries) and all(map(is_, holder, entries))
    return is_same and (not isinstance(holder, dict) or all(map(is_, holder.values(), entries.values())))


def _guards_of(tensors: list[torch.Tensor]) -> TensorGuards:
    sizes, strides = ([list(question(tensor)) for tensor in tensors] for question in (_size, _stride))
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]


def _shapes_of(tensors: list[torch.Tensor]) -> list[list[Any]]:
    return [list(map(question, tensors)) for question in (_size, _stride, _dtype)]
