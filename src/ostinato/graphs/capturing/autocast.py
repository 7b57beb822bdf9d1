"""Autocast and recordings: its state belongs to a captured call, its cache of cast weights must stay out."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch


@contextmanager
def clean_autocast_cache() -> Iterator[None]:
    """Begin without cached casts, make none, leave none.

    A cast cached before a recording would be baked in as data that no weight update reaches; one cached
    during it lives in the pool and must not be met by eager code afterwards. Warm-ups run in here as well:
    torch.compile guards on the flag.
    """
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(before)


@dataclass(frozen=True)
class AutocastState:
    """Which devices cast automatically, and to what."""

    devices: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def now(cls) -> "AutocastState":
        """As it is in the calling code."""
        active = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        return cls(tuple((kind, torch.get_autocast_dtype(kind)) for kind in active))

    def restored(self) -> AbstractContextManager[object]:
        """A context in which it is so again."""
        now = AutocastState.now()
        if now == self:
            return nullcontext()
        stack = ExitStack()
        for kind, dtype in now.devices:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=False))
        for kind, dtype in self.devices:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        return stack
