"""Who gives an engine the memory that lives as long as it does: torch, or arenas, by tag."""

from collections.abc import Callable
from typing import Literal

import torch

from ostinato.kernels.allocation import Allocate

Tag = Literal["weights", "kv_cache"]
"""`weights`: what loading fills, and can fill again. `kv_cache`: worth nothing once its requests are gone."""

Arenas = Callable[[Tag, torch.device], Allocate | None]
"""`arenas(tag, device)`: who allocates what has this tag; None: torch."""


def from_torch(tag: Tag, device: torch.device) -> Allocate | None:
    """No arenas."""
    return None
