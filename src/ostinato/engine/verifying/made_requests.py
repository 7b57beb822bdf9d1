"""Requests made up for a verification: histories of many lengths, some with a common prefix.

All graphs run on the same requests, so the reference computes each history once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.kernels.constants import PAGE_SIZE

from ..scheduling.request import IntArray

_FIRST = (3, 17, 0, 16, 1, 15, 33, 40, 2, 130, 32, 65)
"""Lengths of the first requests, 0: the longest. The first ones serve the small graphs, so a short context,
where a single key counts for much, comes first, and page boundaries come next."""
_LONGEST_AT = _FIRST.index(0)
_SHARING = 8
"""One request in this many begins like the longest."""
_SHARED_PAGES = 2


@dataclass(frozen=True, eq=False)
class MadeRequest:
    """A history of tokens, and where its keys and values lie."""

    tokens: IntArray
    """int64 [L]."""
    places: IntArray
    """Its pages, by their place among the borrowed ones."""
    first_own: int
    """Positions before this one lie on pages of another request: steps do not compute them."""
    begin: int
    """Where its tokens begin among those of all requests."""

    @property
    def length(self) -> int:
        """L."""
        return len(self.tokens)

    def slots(self, first: int, last: int) -> IntArray:
        """int64: the slots of positions [first, last)."""
        positions = np.arange(first, last)
        slots: IntArray = self.places[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        return slots

    @property
    def room(self) -> int:
        """Positions on its pages."""
        return len(self.places) * PAGE_SIZE


@dataclass(frozen=True)
class Room:
    """What made requests must fit into."""

    num_requests: int
    """How many to make."""
    num_pages: int
    """How many pages they may take together."""
    longest: int
    """Tokens of the longest one."""
    tokens: int
    """Their total length to aim for, if there are enough pages."""


def make_requests(room: Room, vocab_size: int, generator: np.random.Generator) -> list[MadeRequest]:
    """As many requests as asked for, each with at least one page."""
    lengths = _lengths(room, generator)
    requests: list[MadeRequest] = []
    begin = used = 0
    for at, length in enumerate(lengths):
        tokens = generator.integers(0, vocab_size, length)
        shared = _shared_pages(at, length, lengths[_LONGEST_AT] if len(lengths) > _LONGEST_AT else 0)
        places = np.arange(used, used + _pages(length) - shared)
        if shared:
            other = requests[_LONGEST_AT]
            tokens[: shared * PAGE_SIZE] = other.tokens[: shared * PAGE_SIZE]
            places = np.concatenate([other.places[:shared], places])
        requests.append(MadeRequest(tokens, places, shared * PAGE_SIZE, begin))
        begin, used = begin + length, used + _pages(length) - shared
    # Others read the longest request's own first pages: they are not computed again either.
    if any(request.first_own for request in requests):
        longest = requests[_LONGEST_AT]
        shared = max(request.first_own for request in requests)
        requests[_LONGEST_AT] = MadeRequest(longest.tokens, longest.places, shared, longest.begin)
    assert used <= room.num_pages
    return requests


def num_pages_of(requests: Sequence[MadeRequest]) -> int:
    """Pages that they take together."""
    return 1 + max(int(request.places.max()) for request in requests)


def _shared_pages(at: int, length: int, longest: int) -> int:
    """Pages that a request shares with the longest one."""
    if at <= _LONGEST_AT or at % _SHARING != _SHARING - 1:
        return 0
    shared = min(_SHARED_PAGES, (length - 1) // PAGE_SIZE)
    return shared if longest > shared * PAGE_SIZE else 0


def _lengths(room: Room, generator: np.random.Generator) -> list[int]:
    """The length of each request: as wanted, as far as the pages suffice."""
    left = room.num_pages - room.num_requests
    lengths = []
    for at in range(room.num_requests):
        wanted = _FIRST[at] if at < len(_FIRST) else int(generator.integers(1, 50))
        wanted = min(wanted or room.longest, room.longest)
        if at == _LONGEST_AT:  # leave some for the others
            wanted = min(wanted, max(1, 1 + left // 2) * PAGE_SIZE)
        length = min(wanted, (1 + left) * PAGE_SIZE)
        lengths.append(length)
        left -= _pages(length) - 1
    # The last ones grow, in turn, until there are enough tokens to fill the largest step.
    for at in reversed(range(_LONGEST_AT + 1, room.num_requests)):
        missing = room.tokens - sum(lengths)
        if missing <= 0 or left <= 0:
            break
        grown = min(room.longest, lengths[at] + missing, (_pages(lengths[at]) + left) * PAGE_SIZE)
        left -= _pages(grown) - _pages(lengths[at])
        lengths[at] = grown
    return lengths


def _pages(length: int) -> int:
    return -(-length // PAGE_SIZE)
