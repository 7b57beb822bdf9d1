"""What pausing and resuming did, and what there is."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Held:
    """Bytes of one tag and class of contents."""

    mapped: int = 0
    """With memory behind them."""
    released: int = 0
    """Addresses without."""
    backup: int = 0
    """On the host: room for contents, in use or kept for the next pause."""


@dataclass(frozen=True)
class Paused:
    """What `pause` did."""

    tags: tuple[str, ...] = ()
    """Those that were awake."""
    released: int = 0
    """Bytes given back to the device."""
    backed_up: int = 0
    """Of these, bytes whose contents are on the host."""
    seconds: dict[str, float] = field(default_factory=dict)
    """`wait` for the device, `room` for backups, `copy`, `release`."""


@dataclass(frozen=True)
class Resumed:
    """What `resume` did."""

    tags: tuple[str, ...] = ()
    """Those that were asleep."""
    taken: int = 0
    """Bytes taken from the device."""
    restored: int = 0
    """Of these, bytes whose contents are back."""
    lost: tuple[str, ...] = ()
    """Tags whose data was dropped: undefined until somebody writes it again."""
    seconds: dict[str, float] = field(default_factory=dict)
    """`take` memory, `rewrite` what is written again, and what is left of `copy` beside them."""
