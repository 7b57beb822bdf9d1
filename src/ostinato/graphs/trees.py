"""Trees of arguments and results: what torch's pytrees know, and dataclasses.

A dataclass that nobody registered is a leaf to torch. Here its fields are leaves, and nothing is registered:
the process's other users of pytrees see no difference.

Note [Made without constructors]
torch builds containers by their constructors, and those of a ModelOutput take ten times as long as what they
make. Where every object of a tree is a plain container or a dataclass that holds nothing but leaves and None,
its constructor cannot have done anything that shows but to put them in their places: so one tree is built
that way, and the places are read off.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class _Record:
    """A dataclass among the leaves of a pytree: where, what it looks like without values, and its fields."""

    place: int
    empty: Any
    names: tuple[str, ...]
    inside: "Structure"

    def alike(self, other: "_Record") -> bool:
        same_class = type(self.empty) is type(other.empty)
        return same_class and (self.place, self.names) == (other.place, other.names)


@dataclass(frozen=True, eq=False)
class Structure:
    """A tree without its leaves."""

    spec: pytree.TreeSpec
    records: tuple[_Record, ...] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return NotImplemented
        if self.spec != other.spec or len(self.records) != len(other.records):
            return False
        pairs = zip(self.records, other.records, strict=True)
        return all(a.alike(b) and a.inside == b.inside for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]

    def filled(self, leaves: Sequence[Any]) -> Any:
        """The tree with these leaves, in containers of its own."""
        return self._filled(iter(leaves)) if self.records else pytree.tree_unflatten(leaves, self.spec)

    def _filled(self, leaves: Iterator[Any]) -> Any:
        by_place = {record.place: record for record in self.records}
        filled = []
        for place in range(self.spec.num_leaves):
            record = by_place.get(place)
            if record is None:
                filled.append(next(leaves))
            else:
                values = record.inside._filled(leaves)
                filled.append(_with_fields(copy.copy(record.empty), record.names, values))
        return pytree.tree_unflatten(filled, self.spec)


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of a tree, and how to put others in their places."""
    leaves, spec = pytree.tree_flatten(tree)
    if not any(map(_is_record, leaves)):
        return leaves, Structure(spec)
    flat: list[Any] = []
    records = []
    for place, leaf in enumerate(leaves):
        if not _is_record(leaf):
            flat.append(leaf)
            continue
        names = _present_fields(leaf)
        inner, inside = flatten([getattr(leaf, name) for name in names])
        records.append(
            _Record(place, _with_fields(copy.copy(leaf), names, [None] * len(names)), names, inside)
        )
        flat += inner
    return flat, Structure(spec, tuple(records))


def flatten_with_names(tree: Any) -> tuple[list[tuple[tuple[Any, ...], str, Any]], Structure]:
    """As `flatten`; each leaf with its path in torch's pytree and its name behind that of the tree's."""
    named: list[tuple[tuple[Any, ...], str, Any]] = []
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        if _is_record(leaf):
            for field in _present_fields(leaf):
                inner, _ = flatten_with_names(getattr(leaf, field))
                named += [(path, f"{pytree.keystr(path)}.{field}{name}", value) for _, name, value in inner]
        else:
            named.append((path, pytree.keystr(path), leaf))
    return named, flatten(tree)[1]


def leaves_of(tree: Any) -> list[Any]:
    """The leaves alone; nothing is copied."""
    leaves: list[Any] = []
    for leaf in pytree.tree_leaves(tree):
        if _is_record(leaf):
            leaves += leaves_of([getattr(leaf, name) for name in _present_fields(leaf)])
        else:
            leaves.append(leaf)
    return leaves


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same tree with every tensor changed."""
    leaves, structure = flatten(tree)
    return structure.filled([change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors of a tree."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor)]


def _is_record(leaf: Any) -> bool:
    return hasattr(type(leaf), "__dataclass_fields__")


def _present_fields(record: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(record) if hasattr(record, field.name))


def _with_fields(record: Any, names: Sequence[str], values: Sequence[Any]) -> Any:
    frozen = type(record).__dataclass_params__.frozen
    for name, value in zip(names, values, strict=True):
        (object.__setattr__ if frozen else setattr)(record, name, value)
    return record


class Maker:
    """Makes trees of one structure from their leaves, see Note [Made without constructors]."""

    def __init__(self, structure: Structure, leaves: Sequence[Any]) -> None:
        """`leaves`: of one such tree."""
        self._structure = structure
        self._without = [leaf is None for leaf in leaves]
        self._steps: list[_Step] = []
        """Each makes an object of the leaves, None and what those before it made; the last one the tree."""
        if all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves):
            examples = [None if leaf is None else leaf.detach() for leaf in leaves]
            places = {id(leaf): place for place, leaf in enumerate(examples)}
            places[id(None)] = len(examples)
            if not self._add(structure.filled(examples), places, len(examples) + 1):
                self._steps = []

    def is_for(self, structure: Structure, leaves: Sequence[Any]) -> bool:
        """Returns whether it makes such trees."""
        return [leaf is None for leaf in leaves] == self._without and structure == self._structure

    def made(self, leaves: list[Any]) -> Any:
        """The tree with these leaves, in containers of its own."""
        if not self._steps:
            return self._structure.filled(leaves)
        parts = [*leaves, None]
        for step in self._steps:
            parts.append(step(parts))
        return parts[-1]

    def _add(self, value: Any, places: dict[int, int], num_given: int) -> bool:
        """Add what makes such an object; False if there may be more to it than is seen."""
        if id(value) in places:
            return True
        base = _plain_base(value)
        if base is None:
            return False
        inside = list(value.values()) if issubclass(base, dict) else list(value) if base is not object else []
        own = {} if base is type(value) or base is tuple else vars(value)
        if not all(self._add(part, places, num_given) for part in (*inside, *own.values())):
            return False
        entries = _taking([places[id(part)] for part in inside])
        attributes = _taking([places[id(part)] for part in own.values()])
        names = tuple(value) if issubclass(base, dict) else ()
        self._steps.append(_step(type(value), base, names, entries, tuple(own), attributes))
        places[id(value)] = num_given + len(self._steps) - 1
        return True


_Step: TypeAlias = Callable[[list[Any]], Any]


def _plain_base(value: Any) -> type | None:
    """Which plain container it is, or is derived from; `object` for a dataclass that is none. None if it may
    hold something that is neither an entry nor an attribute."""
    kind = type(value)
    if kind in (tuple, list, dict, OrderedDict):
        return kind
    if kind.__bases__ == (tuple,) and hasattr(kind, "_fields") and kind.__basicsize__ == tuple.__basicsize__:
        return tuple
    base = next(each for each in (OrderedDict, dict, object) if issubclass(kind, each))
    of_python = [each for each in kind.__mro__ if each not in OrderedDict.__mro__]
    is_plain = _is_record(value) and all(
        "__module__" in vars(each) and not vars(each).get("__slots__") for each in of_python
    )
    room = kind.__basicsize__ - base.__basicsize__  # of attributes and weak references alone
    return base if is_plain and hasattr(value, "__dict__") and room <= _ROOM else None


_ROOM = 16


def _taking(places: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """What takes these out of a list."""
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda parts: (parts[places[0]],)) if places else (lambda parts: ())


def _step(
    kind: type,
    base: type,
    keys: tuple[Any, ...],
    entries: Callable[[list[Any]], tuple[Any, ...]],
    names: tuple[str, ...],
    attributes: Callable[[list[Any]], tuple[Any, ...]],
) -> _Step:
    """What makes an object of a class from its entries and attributes."""
    if kind is tuple:
        return entries
    if base in (tuple, list):
        return lambda parts: base.__new__(kind, entries(parts)) if base is tuple else list(entries(parts))
    if kind is base:
        return lambda parts: kind(zip(keys, entries(parts), strict=True))  # type: ignore[call-arg]
    new: Any = base.__new__
    put: Any = base.__setitem__ if issubclass(base, dict) else None

    def record(parts: list[Any]) -> Any:
        made = new(kind)
        for key, entry in zip(keys, entries(parts), strict=True):
            put(made, key, entry)
        made.__dict__.update(zip(names, attributes(parts), strict=True))
        return made

    return record
