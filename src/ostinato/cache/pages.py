"""Which request owns which page of the KV cache, and which pages hold a prefix that others can share.

Note [Regions of a cached request]
A request of 75 tokens with pages of 16, admitted with a prefix hit of two pages, after its first chunk:

    position   0        16        32        48        64       75
               |---------|---------|---------|---------|---------|- - -|
    page            7         3         9         4         6
               |  shared, from the |  its own, |   its own,    | the end
               |  cache            |  full,    |   not full    | of the
               |                   |  cached   |   or not      | page is
               |                   |  now too  |   computed    | unused
               |<----- committed: never written again --->|<-- private, written slot by slot
               |<----- may have other owners ------------>|<-- exactly one owner

Note [What is evicted first]
A page is found through all pages before it (Note [Exact prefixes] in prefix_index), so a page whose
predecessor was evicted is lost, and takes memory until it is evicted itself. Hence the end of a chain goes
first: the owner of a page owns all pages before it (`match` returns whole chains, and `commit` swaps a page
for its cached twin if an equal one is cached already), and `free` releases the last page first. The
exception, which `check_integrity` is told about, are requests that look back through windows only: they give
up the beginning of their chain early.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ostinato.kernels.constants import PAGE_SIZE

from .prefix_index import IntArray, PrefixIndex

RESERVED_PAGE = 0
"""Padding reads and writes this page; no request ever owns it. As a parent it means: no page before."""


class OutOfPages(RuntimeError):
    """More pages were requested than are free or can be evicted."""


class PageIntegrityError(RuntimeError):
    """A page is leaked, lost, owned twice where it must not be, or cached under a wrong key."""


@dataclass(frozen=True)
class PageStatistics:
    """What the prefix cache has done since the start."""

    queried_tokens: int = 0
    """Tokens of admitted requests that were looked up."""
    hit_tokens: int = 0
    """Of those, tokens whose pages were found."""
    commits: int = 0
    """Pages that became shareable."""
    twins: int = 0
    """Pages given up because an equal page was cached already."""
    evictions: int = 0
    """Cached pages overwritten because no empty page was left."""

    @property
    def hit_rate(self) -> float:
        """The share of queried tokens that were found, from 0 to 1."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


class _Unused(NamedTuple):
    """Cached pages that lost their last owner together."""

    event: int
    """See `PageAllocator._became_unused`."""
    pages: IntArray
    """In the order in which they will be evicted."""


_LOOKED_AT = 64
"""How many pages are examined together when one must be evicted."""


class PageAllocator:
    """Hands out pages 1..num_pages-1 with reference counts, and remembers the content of full ones."""

    def __init__(self, num_pages: int, page_size: int = PAGE_SIZE) -> None:
        """Manage `num_pages` pages of `page_size` tokens, including page 0."""
        if num_pages < 2:
            raise ValueError(f"a KV cache needs at least 2 pages (page 0 is reserved), not {num_pages}")
        if page_size < 1:
            raise ValueError(f"a page must hold at least one token, not {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._owners = np.zeros(num_pages, dtype=np.int32)
        # Every page but 0 is in exactly one place: owned, empty, or evictable (unused, with content).
        self._empty = list(range(num_pages - 1, 0, -1))
        # In the order in which they lost their last owner, grouped by those that lost it together. An entry
        # counts until its page is used again.
        self._evictable: deque[_Unused] = deque()
        self._num_entries = 0
        self._num_evictable = 0
        self._were_used_again = False
        """Whether evictable pages were used again since `catch_up`."""
        self._became_unused = np.zeros(num_pages, dtype=np.int64)
        """The number of that event, by page."""
        self._num_events = 0
        self._index = PrefixIndex(num_pages, page_size)
        self._is_cached = np.zeros(num_pages, dtype=bool)
        self._counts: Counter[str] = Counter()

    @property
    def num_usable(self) -> int:
        """Pages that requests can own: all but page 0."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages without an owner, whether or not they hold cached content."""
        return len(self._empty) + self._num_evictable

    @property
    def num_cached(self) -> int:
        """Pages whose content can be found by `match`."""
        return len(self._index)

    @property
    def statistics(self) -> PageStatistics:
        """A snapshot of the counters."""
        return PageStatistics(**self._counts)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` pages, each with one owner: empty pages first, then the least recently used."""
        if count > self.num_free:
            raise OutOfPages(f"{count} pages were requested, {self.num_free} of {self.num_usable} are free")
        kept = max(0, len(self._empty) - count)
        taken = self._empty[kept:][::-1]
        del self._empty[kept:]
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        self._owners[taken] = 1
        return taken

    def free(self, pages: Sequence[int] | IntArray) -> None:
        """Give up one reference to each page of a request, given in the order of their positions.

        Steps that have been launched may still read or write the pages: their next owner runs in a later step
        of the same stream, and overwrites a slot before reading it.
        """
        given = np.asarray(pages, dtype=np.intp)
        owners = self._owners.take(given)
        assert _all(owners), f"a page of {given[owners == 0]} is freed but has no owner"
        left = owners - 1
        self._owners[given] = left
        # Usually all or none of them are unused now and have content.
        unused = given[left == 0] if np.count_nonzero(left) else given
        has_content = self._is_cached.take(unused)
        kept = unused if _all(has_content) else unused[has_content]
        if len(kept) < len(unused):
            self._empty += unused[~has_content][::-1].tolist()
        if len(kept):
            kept = kept[::-1].copy()  # the caller may write to its array
            self._num_events += 1
            self._became_unused[kept] = self._num_events
            self._evictable.append(_Unused(self._num_events, kept))
            self._num_entries += len(kept)
            self._num_evictable += len(kept)
        if self._num_entries > 2 * self.num_pages:
            self._forget_used()

    def contents(self, token_ids: Sequence[int] | IntArray) -> list[bytes]:
        """The token ids of each page that these fill, for `commit`."""
        return self._index.contents(token_ids)

    def match(self, token_ids: Sequence[int] | IntArray, salt: bytes = b"") -> IntArray:
        """The cached pages of the longest known prefix, without taking them (see `share`).

        Never the whole prompt: the last token must be computed, because its logits are needed. `salt`: find
        only pages of chains whose first page was committed with the same salt.
        """
        return self._index.find(token_ids[:-1], salt)

    def num_unowned(self, pages: Sequence[int] | IntArray) -> int:
        """How many of these pages `share` would take from the free ones."""
        if not len(pages):
            return 0
        wanted = _without_page_0(pages)
        return len(wanted) - int(np.count_nonzero(self._owners[wanted]))

    def share(self, pages: Sequence[int] | IntArray, queried_tokens: int) -> None:
        """Add an owner to each page that `match` returned for a request of `queried_tokens` tokens.

        Page 0 stands for a page that was found and is not needed.
        """
        self._counts["queried_tokens"] += queried_tokens
        if not len(pages):
            return
        found = _without_page_0(pages)
        assert _all(self._is_cached.take(found)), "a page is shared but was never committed"
        self._own(found)
        self._counts["hit_tokens"] += len(pages) * self.page_size

    def _own(self, pages: IntArray) -> None:
        """Add an owner to each of these cached pages."""
        owners = self._owners.take(pages)
        num_unused = len(pages) - int(np.count_nonzero(owners))
        self._num_evictable -= num_unused
        self._were_used_again |= num_unused > 0
        self._owners[pages] = owners + 1

    def commit(self, page: int, parent: int, content: bytes) -> int:
        """Make a page shareable once the KV of all its tokens, see `contents`, has been computed.

        `parent` is the page before it (0 for the first), itself committed. If an equal page is already
        cached, the caller's reference moves to that twin. Returns the page that the caller owns from now on.
        A request's salt, if it has one, precedes the content of its first page.
        """
        assert self._owners[page] == 1, "a page is private until it is committed"
        twin = self._index.behind(parent, content)
        if twin is not None:
            self._exchange(np.array([page]), [twin])
            return twin
        self._index.enter(page, parent, content)
        self._is_cached[page] = True
        self._counts["commits"] += 1
        return page

    def commit_row(self, pages: Sequence[int], parent: int, contents: Sequence[bytes]) -> list[int]:
        """`commit` consecutive pages; for many pages this takes half the time. Returns all of them."""
        own, twins = np.array(pages, dtype=np.intp), list[int]()
        assert (self._owners[own] == 1).all(), "a page is private until it is committed"
        # After a new page there is nothing yet.
        for content in contents:
            twin = self._index.behind(twins[-1] if twins else parent, content)
            if twin is None:
                break
            twins.append(twin)
        if twins:
            self._exchange(own[: len(twins)], twins)
        new = list(pages[len(twins) :])
        if new:
            self._index.enter_row(new, twins[-1] if twins else parent, contents[len(twins) :])
            self._is_cached[own[len(twins) :]] = True
            self._counts["commits"] += len(new)
        return twins + new

    def catch_up(self) -> None:
        """Do deferred work that only makes later calls faster."""
        self._index.catch_up()
        if self._were_used_again and self._evictable:
            # A prefix in constant use is released and shared again and again, each time with all its pages.
            self._were_used_again = False
            newest = self._evictable[-1]
            still = self._still(newest)
            left = self._num_entries - len(newest.pages) + len(still)
            self._evictable[-1], self._num_entries = _Unused(newest.event, still), left

    def _exchange(self, pages: IntArray, twins: list[int]) -> None:
        """Let the owner of these pages have their twins instead."""
        self._own(np.array(twins))
        self.free(pages)
        self._counts["twins"] += len(twins)

    def flush(self) -> None:
        """Forget all content (the weights have changed). Owners keep their pages, but `match` finds none.

        An owner must not commit pages that build on ones from before the flush.
        """
        self._empty += reversed(self._in_order())
        self._forget_evictable()
        self._is_cached[:] = False
        self._index.clear()

    def restore(self, owners: Iterable[Sequence[int]]) -> None:
        """Rebuild the books, whatever state they are in, from the page lists of all owners, and forget all
        content. As after `flush`, an owner must not commit pages that build on earlier ones."""
        held = Counter(page for pages in owners for page in pages)
        self._owners[:] = [held[page] for page in range(self.num_pages)]
        self._empty = [page for page in range(self.num_pages - 1, 0, -1) if not held[page]]
        self._forget_evictable()
        self._is_cached[:] = False
        self._index = PrefixIndex(self.num_pages, self.page_size)

    def check_integrity(self, owners: Iterable[Sequence[int]], *, chains_are_whole: bool = True) -> None:
        """Raises PageIntegrityError unless the books agree with the page lists of all owners.

        `chains_are_whole`: whether the owner of a page must own all pages before it.
        """
        held = self._counted([page for pages in owners for page in pages])
        empty, evictable = self._counted(self._empty), self._counted(self._in_order())
        if evictable.sum() != self._num_evictable:
            raise PageIntegrityError(
                f"{self._num_evictable} pages are counted as evictable, but {evictable.sum()} are"
            )
        for page in np.flatnonzero(held != self._owners).tolist():
            word = "leaked" if held[page] < self._owners[page] else "owned without a reference"
            raise PageIntegrityError(
                f"page {page} is {word}: {self._owners[page]} references, {held[page]} owners"
            )
        places = empty + evictable + (held > 0)
        for page in np.flatnonzero(places != (np.arange(self.num_pages) != RESERVED_PAGE)).tolist():
            raise PageIntegrityError(
                f"page {page} is in {places[page]} places: {held[page]} owners, listed as empty "
                f"{empty[page]} times and as evictable {evictable[page]} times"
            )
        self._check_keys()
        in_wrong_list = np.flatnonzero(((empty > 0) & self._is_cached) | ((evictable > 0) & ~self._is_cached))
        for page in in_wrong_list.tolist():
            raise PageIntegrityError(f"unused page {page} is in the wrong list for its content")
        if chains_are_whole:
            self._check_order()

    def _check_keys(self) -> None:
        if not self._index.is_sound():
            raise PageIntegrityError("the parts of the index of cached pages disagree")
        if np.flatnonzero(self._is_cached).tolist() != sorted(self._index.pages):
            raise PageIntegrityError("some pages are marked as cached but are not, or the other way round")
        if self._num_entries != sum(len(unused.pages) for unused in self._evictable):
            raise PageIntegrityError("the number of entries of evictable pages is wrong")

    def _check_order(self) -> None:
        age = {page: at for at, page in enumerate(self._in_order())}
        for page in self._index.pages:
            parent = self._index.parent_of(page)
            if parent is None:
                raise PageIntegrityError(f"page {page} is cached after a page that is not")
            if parent in age and not age.get(page, self.num_pages) < age[parent]:
                raise PageIntegrityError(
                    f"page {parent} would be evicted before page {page}, which follows it"
                )

    def _counted(self, pages: list[int]) -> IntArray:
        """How often each page occurs in these."""
        return np.bincount(np.array(pages, dtype=np.intp), minlength=self.num_pages)

    def _in_order(self) -> list[int]:
        """The evictable pages, in the order of eviction."""
        return [page for unused in self._evictable for page in self._still(unused).tolist()]

    def _still(self, unused: _Unused) -> IntArray:
        """Those of these pages that have not been used since."""
        pages = unused.pages
        return pages[(self._became_unused[pages] == unused.event) & (self._owners[pages] == 0)]

    def _forget_used(self) -> None:
        """Drop entries that are no longer valid."""
        still = [_Unused(unused.event, self._still(unused)) for unused in self._evictable]
        self._evictable = deque(unused for unused in still if len(unused.pages))
        self._num_entries = self._num_evictable

    def _forget_evictable(self) -> None:
        self._evictable.clear()
        self._num_entries = self._num_evictable = 0

    def _evict(self, count: int) -> list[int]:
        """Evict `count` of the evictable pages."""
        taken: list[int] = []
        while (wanted := count - len(taken)) > 0:
            event, pages = self._evictable.popleft()
            looked_at = max(wanted, _LOOKED_AT)
            first = self._still(_Unused(event, pages[:looked_at]))
            for left in (pages[looked_at:], first[wanted:]):
                if len(left):
                    self._evictable.appendleft(_Unused(event, left))
            self._num_entries -= len(pages[:looked_at]) - len(first[wanted:])
            taken += first[:wanted].tolist()
        self._index.remove(taken)
        self._is_cached[taken] = False
        self._num_evictable -= count
        self._counts["evictions"] += count
        return taken


def _without_page_0(pages: Sequence[int] | IntArray) -> IntArray:
    listed = np.asarray(pages, dtype=np.intp)
    return listed if _all(listed) else listed[listed != RESERVED_PAGE]


def _all(numbers: IntArray) -> bool:
    """Whether none of these is 0; takes half the time of numpy's own."""
    return np.count_nonzero(numbers) == len(numbers)
