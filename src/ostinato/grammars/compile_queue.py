"""Grammars that wait to be compiled, by tenant: whoever has the fewest being compiled is next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator

from .followed_text import GrammarEntry


class CompileQueue:
    """Each grammar is in the queue of every tenant that waits for it, and leaves all of them at once."""

    def __init__(self) -> None:
        self._queues: dict[str, OrderedDict[GrammarEntry, None]] = {}
        self._tenants: dict[GrammarEntry, set[str]] = {}

    def __contains__(self, entry: GrammarEntry) -> bool:
        return entry in self._tenants

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[GrammarEntry]:
        return iter(list(self._tenants))

    def add(self, entry: GrammarEntry, tenants: Iterable[str], *, first: bool = False) -> None:
        """Queue a grammar for these tenants, behind their others or before them."""
        known = self._tenants.setdefault(entry, set())
        for tenant in set(tenants) - known:
            known.add(tenant)
            queue = self._queues.setdefault(tenant, OrderedDict())
            queue[entry] = None
            if first:
                queue.move_to_end(entry, last=False)

    def remove(self, entry: GrammarEntry) -> None:
        """Take a grammar out for all tenants."""
        for tenant in self._tenants.pop(entry):
            queue = self._queues[tenant]
            del queue[entry]
            if not queue:
                del self._queues[tenant]

    def next(self, compiling: Counter[str]) -> tuple[str, GrammarEntry]:
        """Returns the tenant with the fewest grammars being compiled, and the first that it waits for."""
        tenant = min(self._queues, key=lambda each: compiling[each])
        return tenant, next(iter(self._queues[tenant]))
