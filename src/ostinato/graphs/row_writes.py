"""Calls that write some elements of a tensor, at places that they are given: which, and how to save no more.

A cache of gigabytes is written a few rows at a time, so neither saving what a trial writes nor counting who
writes where may take as much memory as the cache itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

aten = torch.ops.aten

_ALONG = {"index_copy_", "index_fill_", "index_reduce_", "index_add_"}
_SCATTERS = {"scatter_", "scatter_reduce_", "scatter_add_"}
_INDEX_PUTS = {"index_put_", "_index_put_impl_"}
_MASKED = {"masked_fill_", "masked_scatter_"}
_KNOWN = _ALONG | _SCATTERS | _INDEX_PUTS | _MASKED | {"put_"}


@cache
def _name(func: Any) -> str:
    """The name of an op that writes at places that it is given; else none."""
    name = str(func._schema.name.removeprefix("aten::"))
    return name if func.namespace == "aten" and name in _KNOWN else ""


def _given(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        argument.name: args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value)
        for at, argument in enumerate(func._schema.arguments)
    }


@dataclass(frozen=True)
class Rows:
    """Elements of a tensor, one for each entry of an index; several may be the same element."""

    read: Callable[[torch.Tensor], torch.Tensor]
    """Reads them from the tensor."""
    write: Callable[[torch.Tensor, torch.Tensor], object]
    """Writes back to the tensor what was read."""
    is_sum: bool
    """Whether the call adds to them, so that several entries for one element may come in any order."""


def rows_of(func: Any, target: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rows | None:
    """Returns the elements that a call is about to write; None if these are all, or no index says which.

    Of what the call is given only the index is kept, and that in a copy, because the step may change it.
    """
    name = _name(func)
    if not name or name in _MASKED:
        return None
    given = _given(func, args, kwargs)
    if name in _INDEX_PUTS:
        indices = [None if index is None else index.clone() for index in given["indices"]]
        return Rows(
            lambda tensor: aten.index.Tensor(tensor, indices),
            lambda tensor, rows: aten.index_put_.default(tensor, indices, rows),
            bool(given["accumulate"]),
        )
    index = given["index"].clone()
    if name == "put_":
        return Rows(
            lambda tensor: tensor.take(index),
            lambda tensor, rows: tensor.put_(index, rows),
            bool(given["accumulate"]),
        )
    dim = given["dim"]
    if name in _ALONG:
        return Rows(
            lambda tensor: tensor.index_select(dim, index),
            lambda tensor, rows: tensor.index_copy_(dim, index, rows),
            name == "index_add_",
        )
    return Rows(
        lambda tensor: tensor.gather(dim, index),
        lambda tensor, rows: tensor.scatter_(dim, index, rows),
        _adds(name, given),
    )


def is_masked(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call writes where a mask says: once, however many rows name a place."""
    name = _name(func)
    if name in _INDEX_PUTS:
        indices = _given(func, args, kwargs)["indices"]
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
    return name in _MASKED


def hits_of(
    func: Any, target: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """Counts how often a call is about to write each element, in a shape that can be broadcast to the
    target's; None if it writes all of them once. To add zero is no write."""
    name = _name(func)
    if not name:
        return None
    given = _given(func, args, kwargs)
    if name in _MASKED:
        return torch.Tensor.int(given["mask"].expand(target.shape))
    if name in _INDEX_PUTS:
        return _hits_of_index_put(target, given["indices"], given["values"] if given["accumulate"] else None)
    index = given["index"]
    if name == "put_":
        added = given["source"].reshape(-1) if given["accumulate"] else None
        flat = torch.zeros(target.numel(), dtype=torch.int32, device=target.device)
        return _summed(flat, [index.reshape(-1)], _ones(index.reshape(-1), added)).view(target.shape)
    if target.dim() == 0:
        return torch.full((), index.numel(), dtype=torch.int32, device=target.device)
    dim = given["dim"] % target.dim()
    if name == "index_add_":
        return _zeros(target.shape, target).index_add_(dim, index.reshape(-1), (given["source"] != 0).int())
    if name in _ALONG:
        shape = [size if at == dim else 1 for at, size in enumerate(target.shape)]
        places: list[Any] = [None if at != dim else index.reshape(-1) for at in range(dim + 1)]
        return _summed(_zeros(shape, target), places, _zeros((), target) + 1)
    source = given.get("src") if _adds(name, given) else None
    added = None if source is None else source[tuple(map(slice, index.shape))]
    return _summed(_zeros(target.shape, target), _coordinates(dim, index), _ones(index, added))


def _adds(scatter: str, given: Mapping[str, Any]) -> bool:
    return scatter == "scatter_add_" or given.get("reduce") in ("add", "sum")


def _hits_of_index_put(
    target: torch.Tensor, indices: Sequence[torch.Tensor | None], added: torch.Tensor | None
) -> torch.Tensor:
    if added is not None:
        return _summed(_zeros(target.shape, target), indices, (added != 0).int())
    taken = [is_taken for index in indices for is_taken in _dimensions_of(index)]
    taken += [False] * (target.dim() - len(taken))
    shape = [size if is_taken else 1 for size, is_taken in zip(target.shape, taken, strict=True)]
    return _summed(_zeros(shape, target), indices, _zeros((), target) + 1)


def _dimensions_of(index: torch.Tensor | None) -> list[bool]:
    """Which dimensions an index picks from: one, or as many as a mask has."""
    if index is None:
        return [False]
    return [True] * (index.dim() if index.dtype in (torch.bool, torch.uint8) else 1)


def _coordinates(dim: int, index: torch.Tensor) -> list[torch.Tensor]:
    """The places that `scatter_` writes, by dimension."""
    places = []
    for at, size in enumerate(index.shape):
        shape = [size if other == at else 1 for other in range(index.dim())]
        own = torch.arange(size, device=index.device).view(shape).expand(index.shape)
        places.append(index if at == dim else own)
    return places


def _zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=torch.int32, device=like.device)


def _ones(index: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
    return torch.ones_like(index, dtype=torch.int32) if added is None else (added != 0).int()


def _summed(counts: torch.Tensor, places: Sequence[Any], ones: torch.Tensor) -> torch.Tensor:
    return aten.index_put_.default(counts, list(places), ones, True)
