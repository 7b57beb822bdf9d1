"""One loaded state of an adapter: what a request holds on to from its admission to its end."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.models.adapters.adapter import Adapter


@dataclass(eq=False)
class AdapterVersion:
    """Other contents are another version, whatever their name."""

    name: str
    number: int
    """Of these contents in this engine; never used again for others."""
    adapter: Adapter | None
    """On the host; None: given up, to be read again when somebody asks for it."""
    num_users: int = 0
    """Unfinished requests that compute with it."""
    is_current: bool = True
    """Whether new requests of that name get it."""
    is_pinned: bool = False
    """Whether it keeps its slot when nobody uses it."""

    @property
    def salt(self) -> bytes:
        """Stands before what its requests have in the prefix cache. No text of a client's begins so: there is
        no such byte in UTF-8."""
        return b"\xff" + self.number.to_bytes(8, "little")
