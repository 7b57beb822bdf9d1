"""Where an engine's long-lived memory comes from: torch, or arenas, by tag."""

from collections.abc import Callable
from typing import Literal

import torch

from ostinato.kernels.allocation import Allocate

Tag = Literal["weights", "kv_cache"]
"""`weights`: filled by loading, and can be filled again. `kv_cache`: worthless once its requests are gone."""

Arenas = Callable[[Tag, torch.device], Allocate | None]
"""`arenas(tag, device)`: allocates memory of this tag; None: torch does."""


def from_torch(tag: Tag, device: torch.device) -> Allocate | None:
    """No arenas."""
    return None
