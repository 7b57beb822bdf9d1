"""Blocks of memory, what is in them, and what a device can do with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol, get_args

import torch

Tag = Literal["weights", "kv_cache", "graphs"]
"""What is released and taken back together."""
TAGS: tuple[Tag, ...] = get_args(Tag)


class Content(StrEnum):
    """What becomes of contents while their memory is gone."""

    DATA = "data"
    """Backed up, or dropped, as asked at every pause."""
    SCRATCH = "scratch"
    """Nobody misses it: comes back undefined."""
    ONCE = "once"
    """Written at the start and read ever after: always restored."""


@dataclass(frozen=True)
class Kind:
    """What blocks have in common."""

    tag: Tag
    content: Content


@dataclass(frozen=True)
class Block:
    """A range of addresses, whether or not there is memory behind it."""

    serial: int
    """Never used twice, unlike addresses."""
    address: int
    size: int
    kind: Kind
    is_mapped: bool


class Backup(Protocol):
    """Room for the contents of one block, outside the memory that is released."""

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        ...

    def free(self) -> None:
        """Give them back."""
        ...


class Mappings(Protocol):
    """The blocks of a saver on a device. `MemorySaver` decides, this does."""

    device: torch.device
    keeps_backups: bool
    """Whether making backups is so slow that they are kept from one pause to the next."""

    def region(self, kind: Kind) -> AbstractContextManager[None]:
        """What this thread allocates inside lies in blocks of this kind."""
        ...

    def allocate(self, nbytes: int, kind: Kind) -> torch.Tensor:
        """So many bytes in blocks of this kind, as uint8, contents undefined."""
        ...

    def graph_pool(self, kind: Kind) -> Any:
        """A new pool of torch's allocator for captures."""
        ...

    def drop_graph_pool(self, pool: Any) -> bool:
        """Let it go, by its handle, if no graph lives in it; whether it has gone."""
        ...

    def hold(self, kinds: Collection[Kind]) -> AbstractContextManager[None]:
        """No block of these kinds comes or goes inside."""
        ...

    def blocks(self, kinds: Collection[Kind]) -> list[Block]:
        """All blocks of these kinds."""
        ...

    def unmap(self, kinds: Collection[Kind]) -> None:
        """Give back the memory behind all blocks of kinds that are held."""
        ...

    def has_room_for(self, blocks: Sequence[Block]) -> bool:
        """Whether memory behind all of them can be taken, as far as one can tell."""
        ...

    def map(self, kinds: Collection[Kind]) -> None:
        """Take memory for all blocks of kinds that are held; SaverMemoryError: for none."""
        ...

    def make_backups(self, blocks: Sequence[Block]) -> dict[int, Backup]:
        """Room for these blocks, by serial, or an error and no room."""
        ...

    def copy_out(self, blocks: Sequence[Block], backups: Mapping[int, Backup]) -> None:
        """Contents of blocks into their backups."""
        ...

    def copying_in(
        self, blocks: Sequence[Block], backups: Mapping[int, Backup]
    ) -> AbstractContextManager[None]:
        """And back: on the way inside, there at the end."""
        ...

    def fill(self, blocks: Sequence[Block], word: int) -> None:
        """The same 32 bits all over."""
        ...

    def synchronize(self) -> None:
        """Wait until nothing uses the device."""
        ...

    def close(self) -> None:
        """Allocate no more. Blocks that are left go with their tensors."""
        ...
