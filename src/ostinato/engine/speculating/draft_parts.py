"""A draft in memory, with its own keys and values."""

from typing import NamedTuple

from ostinato.cache.kv import KVCache
from ostinato.models.drafts.draft import Draft


class DraftParts(NamedTuple):
    """A draft in memory."""

    model: Draft
    kv: KVCache
    """As many pages as the target's, with the same numbers."""
