"""Trees of arguments and results: what torch's pytrees know, and dataclasses.

A dataclass that nobody registered is a leaf to torch. Here its fields are leaves, and nothing is registered:
the process's other users of pytrees see no difference.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

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
