"""Blocks of memory, their contents, and what a device can do with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol, get_args

import torch

Tag = Literal["weights", "kv_cache", "graphs"]
"""Memory with the same tag is released and restored together."""
TAGS: tuple[Tag, ...] = get_args(Tag)


class Content(StrEnum):
    """What happens to contents while their memory is released."""

    DATA = "data"
    """Backed up or dropped, as requested at every pause."""
    SCRATCH = "scratch"
    """Not needed afterwards: undefined after a resume."""
    ONCE = "once"
    """Written once at the start and only read afterwards: always restored."""


@dataclass(frozen=True)
class Kind:
    """The common properties of blocks: tag and class of contents."""

    tag: Tag
    content: Content


@dataclass(frozen=True)
class Block:
    """A range of addresses, with or without memory behind it."""

    serial: int
    """Never used twice, unlike addresses."""
    address: int
    size: int
    kind: Kind
    is_mapped: bool


class Backup(Protocol):
    """Space for the contents of one block, outside the released memory."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...

    def free(self) -> None:
        """Free the space."""
        ...


class Mappings(Protocol):
    """The blocks of a saver on one device: carries out what `MemorySaver` decides."""

    device: torch.device
    keeps_backups: bool
    """Whether backups are kept from one pause to the next because making them is slow."""

    def region(self, kind: Kind) -> AbstractContextManager[None]:
        """A context in which allocations of this thread go to blocks of this kind."""
        ...

    def allocate(self, nbytes: int, kind: Kind) -> torch.Tensor:
        """Allocate bytes in blocks of this kind, as uint8 with undefined contents."""
        ...

    def graph_pool(self, kind: Kind) -> Any:
        """A new pool of torch's allocator for captures."""
        ...

    def drop_graph_pool(self, pool: Any) -> bool:
        """Drop a pool, given by its handle, unless a graph lives in it. Returns whether it was dropped."""
        ...

    def hold(self, kinds: Collection[Kind]) -> AbstractContextManager[None]:
        """A context in which no block of these kinds is created or freed."""
        ...

    def blocks(self, kinds: Collection[Kind]) -> list[Block]:
        """All blocks of these kinds."""
        ...

    def unmap(self, kinds: Collection[Kind]) -> None:
        """Release the memory of all blocks of these kinds, which must be held."""
        ...

    def has_room_for(self, blocks: Sequence[Block]) -> bool:
        """Whether there seems to be enough memory for all of these blocks."""
        ...

    def map(self, kinds: Collection[Kind]) -> None:
        """Allocate memory for all blocks of these kinds, which must be held, or SaverMemoryError and none."""
        ...

    def make_backups(self, blocks: Sequence[Block]) -> dict[int, Backup]:
        """Make backups for these blocks, by serial; raises and makes none if one fails."""
        ...

    def copy_out(self, blocks: Sequence[Block], backups: Mapping[int, Backup]) -> None:
        """Copy the contents of blocks to their backups."""
        ...

    def copying_in(
        self, blocks: Sequence[Block], backups: Mapping[int, Backup]
    ) -> AbstractContextManager[None]:
        """A context in which backups are copied back; the copies are complete when it ends."""
        ...

    def fill(self, blocks: Sequence[Block], word: int) -> None:
        """Fill these blocks with one 32-bit word."""
        ...

    def synchronize(self) -> None:
        """Wait until nothing uses the device."""
        ...

    def close(self) -> None:
        """Refuse further allocations. Remaining blocks are freed with their tensors."""
        ...
