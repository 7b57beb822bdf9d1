"""Autocast and recordings: the cache of cast weights must stay out."""

from collections.abc import Iterator
from contextlib import contextmanager

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
