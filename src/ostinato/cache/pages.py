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

Note [Exact prefixes]
A full page is found under the key (page before it, its token ids), where page 0 stands before the first.
A dictionary compares keys, not only hashes, so by induction over the pages a hit means that every token
from the start of the request is equal. For that, a page must not be evicted while a key names it:

- an owner of a page owns all pages before it (`match` returns whole chains, and `commit` swaps a page for
  its cached twin where an equal one is cached already), so a page in use keeps its chain in use;
- `free` releases the last page first, so of the unused pages a page is always older than the one before
  it, and the least recently used page never has a cached page behind it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PAGE_SIZE = 16
"""Tokens in a page."""

RESERVED_PAGE = 0
"""Padding reads and writes this page; no request ever owns it. As a parent it means: no page before."""

_PageKey = tuple[int, tuple[int, ...]]


class OutOfPages(RuntimeError):
    """More pages were asked for than are free or can be evicted."""


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


class PageAllocator:
    """Hands out pages 1..num_pages-1 with reference counts, and remembers the content of full ones."""

    def __init__(self, num_pages: int, page_size: int = PAGE_SIZE) -> None:
        """Manage `num_pages` pages of `page_size` tokens, page 0 among them."""
        if num_pages < 2:
            raise ValueError(f"a KV cache needs at least 2 pages (page 0 is reserved), not {num_pages}")
        if page_size < 1:
            raise ValueError(f"a page holds at least one token, not {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._owners = [0] * num_pages
        # Every page but 0 is in exactly one place: owned, empty, or evictable (unused, with content).
        self._empty = list(range(num_pages - 1, 0, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[_PageKey, int] = {}
        self._key_of: dict[int, _PageKey] = {}
        self._counts: Counter[str] = Counter()

    @property
    def num_usable(self) -> int:
        """Pages that requests can own: all but page 0."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages without an owner, whether or not they hold cached content."""
        return len(self._empty) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Pages whose content can be found by `match`."""
        return len(self._key_of)

    @property
    def statistics(self) -> PageStatistics:
        """A snapshot of the counters."""
        return PageStatistics(**self._counts)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one owner: empty pages first, then the least recently used."""
        if count > self.num_free:
            raise OutOfPages(f"{count} pages were asked for, {self.num_free} of {self.num_usable} are free")
        taken = []
        for _ in range(count):
            page = self._empty.pop() if self._empty else self._evict()
            self._owners[page] = 1
            taken.append(page)
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Give up one reference to each page of a request, given in the order of their positions.

        The pages may still be read or written by steps that have been launched: whoever gets them next
        runs in a later step of the same stream, and overwrites a slot before reading it.
        """
        for page in reversed(pages):
            self._release(page)

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """The cached pages of the longest known prefix, without taking them (see `share`).

        Never the whole prompt: the last token is always left to compute, as its logits are needed.
        """
        pages: list[int] = []
        parent = RESERVED_PAGE
        for start in range(0, len(token_ids) - self.page_size, self.page_size):
            page = self._page_of.get((parent, tuple(token_ids[start : start + self.page_size])))
            if page is None:
                break
            pages.append(page)
            parent = page
        return pages

    def num_unowned(self, pages: Iterable[int]) -> int:
        """How many of these pages `share` would take from the free ones."""
        return sum(self._owners[page] == 0 for page in pages)

    def share(self, pages: Sequence[int], queried_tokens: int) -> None:
        """Add an owner to each page that `match` returned for a request of `queried_tokens` tokens."""
        for page in pages:
            assert page in self._key_of, f"page {page} is shared but was never committed"
            self._take_cached(page)
        self._counts["queried_tokens"] += queried_tokens
        self._counts["hit_tokens"] += len(pages) * self.page_size

    def commit(self, page: int, parent: int, token_ids: Sequence[int]) -> int:
        """Make a page shareable once the KV of all its tokens has been computed.

        `parent` is the page before it (0 for the first), itself committed. Where an equal page is cached
        already, the caller's reference moves to that twin. Returns the page the caller owns from now on.
        """
        assert len(token_ids) == self.page_size, "only a full page can be shared"
        assert self._owners[page] == 1, "a page is private until it is committed"
        assert page not in self._key_of, "a page is committed once"
        assert parent == RESERVED_PAGE or parent in self._key_of, "the page before must be committed"
        key = (parent, tuple(token_ids))
        twin = self._page_of.get(key)
        if twin is not None:
            self._take_cached(twin)
            self._release(page)
            self._counts["twins"] += 1
            return twin
        self._page_of[key] = page
        self._key_of[page] = key
        self._counts["commits"] += 1
        return page

    def flush(self) -> None:
        """Forget all content (the weights have changed). Owners keep their pages, but nobody finds them.

        An owner must not commit pages that build on ones from before the flush.
        """
        self._empty.extend(reversed(self._evictable))
        self._evictable.clear()
        self._page_of.clear()
        self._key_of.clear()

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise PageIntegrityError unless the books agree with the page lists of all owners."""
        held = Counter(page for pages in owners for page in pages)
        empty, evictable = Counter(self._empty), Counter(self._evictable.keys())
        for page in range(self.num_pages):
            if held[page] != self._owners[page]:
                word = "leaked" if held[page] < self._owners[page] else "owned without a reference"
                raise PageIntegrityError(
                    f"page {page} is {word}: {self._owners[page]} references, {held[page]} owners"
                )
            places = empty[page] + evictable[page] + (held[page] > 0)
            if places != (page != RESERVED_PAGE):
                raise PageIntegrityError(
                    f"page {page} is in {places} places: {held[page]} owners, "
                    f"{empty[page]} times empty, {evictable[page]} times evictable"
                )
            if (empty[page] and page in self._key_of) or (evictable[page] and page not in self._key_of):
                raise PageIntegrityError(f"unused page {page} is in the wrong list for its content")
        self._check_keys()

    def _check_keys(self) -> None:
        if {page: key for key, page in self._page_of.items()} != self._key_of:
            raise PageIntegrityError("the two directions of the index of cached pages disagree")
        age = {page: position for position, page in enumerate(self._evictable)}
        for page, (parent, _) in self._key_of.items():
            if parent == RESERVED_PAGE:
                continue
            if parent not in self._key_of:
                raise PageIntegrityError(f"page {page} is cached behind page {parent}, which is not")
            if parent in age and not age.get(page, self.num_pages) < age[parent]:
                raise PageIntegrityError(f"page {parent} would be evicted before page {page} behind it")

    def _take_cached(self, page: int) -> None:
        if self._owners[page] == 0:
            del self._evictable[page]
        self._owners[page] += 1

    def _release(self, page: int) -> None:
        assert self._owners[page] > 0, f"page {page} is freed but has no owner"
        self._owners[page] -= 1
        if self._owners[page] == 0:
            if page in self._key_of:
                self._evictable[page] = None
            else:
                self._empty.append(page)

    def _evict(self) -> int:
        page, _ = self._evictable.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        self._counts["evictions"] += 1
        return page
