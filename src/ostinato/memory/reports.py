"""Reports on what is held and on what pausing and resuming did."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Held:
    """Bytes of one tag and class of contents."""

    mapped: int = 0
    """Bytes that have memory."""
    released: int = 0
    """Bytes of addresses whose memory is released."""
    backup: int = 0
    """Bytes of backups on the host, in use or kept for the next pause."""


@dataclass(frozen=True)
class Paused:
    """What `pause` did."""

    tags: tuple[str, ...] = ()
    """The tags that this call paused."""
    released: int = 0
    """Bytes released to the device."""
    backed_up: int = 0
    """Of these, bytes whose contents were backed up to the host."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase: `wait` for the device, make `room` for backups, `copy`, `release`."""


@dataclass(frozen=True)
class Resumed:
    """What `resume` did."""

    tags: tuple[str, ...] = ()
    """The tags that this call resumed."""
    taken: int = 0
    """Bytes allocated on the device."""
    restored: int = 0
    """Of these, bytes whose contents were restored."""
    lost: tuple[str, ...] = ()
    """Tags whose data was dropped and is undefined until it is written again."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase: `take` memory, `rewrite` callbacks, and the part of `copy` that did not overlap them."""
