"""Places that a function assigns tensors to: results of another kind, which a replay hands out there."""

from collections import deque
from collections.abc import Collection
from typing import Any

import torch

from ..memory import storage_address
from ..trees import tensors_in
from .holders import MISSING, Key, identity, item_of, put


class Assigned:
    """Such places, and what stood there before."""

    def __init__(self, places: list[tuple[str, Any, Any, Any]]) -> None:
        self.places = places
        """Name, holder, key, and what stood there before."""

    def __bool__(self) -> bool:
        return bool(self.places)

    def keys(self) -> set[Key]:
        """The places."""
        return {(identity(holder), key) for _, holder, key, _ in self.places}

    @property
    def names(self) -> list[str]:
        """Of all places; of a list once, whatever was put into it."""
        return [
            name.removesuffix(str(key)) if isinstance(holder, list | deque) else name
            for name, holder, key, _ in self.places
        ]

    def besides(self, keys: Collection[Key]) -> list[str]:
        """The names of other places than these."""
        return [name for name, holder, key, _ in self.places if (identity(holder), key) not in keys]

    def carried_on(self, reads: Collection[int]) -> str | None:
        """A place whose former tensor was used (its storage is among `reads`), or that is in a list or is a
        parameter or buffer: state that is kept by assignment, which no replay would carry on."""
        for name, holder, _, was in self.places:
            if isinstance(holder, list | deque) or isinstance(was, torch.nn.Parameter | torch.nn.Buffer):
                return name
            if was is not MISSING and any(storage_address(t) in reads for t in tensors_in(was)):
                return name
        return None

    def goes_on_from_former(self, reads: Collection[int], tables: Collection[int]) -> str | None:
        """A place whose former tensor was used, or that is in one of these tables (buffers, by identity), and
        where other memory stands now."""
        for name, holder, key, was in self.places:
            former = {storage_address(tensor) for tensor in ([] if was is MISSING else tensors_in(was))}
            now = {storage_address(tensor) for tensor in tensors_in(item_of(holder, key))}
            if not now <= former and (id(holder) in tables or not former.isdisjoint(reads)):
                return name
        return None

    def without_former(self) -> "Assigned":
        """The places alone: what stood there is free to go."""
        return Assigned([(name, holder, key, None) for name, holder, key, _ in self.places])

    def storages(self) -> set[int]:
        """Where the tensors that stand there now have their memory."""
        values = (item_of(holder, key) for _, holder, key, _ in self.places)
        return {storage_address(tensor) for value in values for tensor in tensors_in(value)}

    def values(self) -> list[Any]:
        """What stands in these places now."""
        return [item_of(holder, key) for _, holder, key, _ in self.places]

    def put(self, values: list[Any]) -> None:
        """Let what a replay made stand there."""
        for (_, holder, key, _), value in zip(self.places, values, strict=True):
            put(holder, key, value)
