"""One loaded state of an adapter, which a request holds from admission to its end."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.models.adapters.adapter import Adapter


@dataclass(eq=False)
class AdapterVersion:
    """Different contents are a different version, even under the same name."""

    name: str
    number: int
    """Identifies these contents in this engine; never reused."""
    adapter: Adapter | None
    """On the host; None: dropped, to be read again on the next request."""
    num_users: int = 0
    """Unfinished requests that compute with it."""
    is_current: bool = True
    """Whether new requests of that name get it."""
    is_pinned: bool = False
    """Whether it keeps its slot when unused."""

    @property
    def salt(self) -> bytes:
        """Prefixes the keys of its requests in the prefix cache. No client's text can begin with it: the byte
        does not occur in UTF-8."""
        return b"\xff" + self.number.to_bytes(8, "little")
