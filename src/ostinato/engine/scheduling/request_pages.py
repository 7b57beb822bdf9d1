"""The pages of running requests: taken, shared by prefix, committed when full, given back.

What a request has is in three places: its list of pages, the capacity in its row, and the page table on the
device. The first two change here at once; what the device has to be told is collected for the next step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from ostinato.cache.pages import RESERVED_PAGE, PageAllocator

from .request import IntArray, Request, RequestRows
from .scheduled_step import PageUpdate

_AT_A_TIME = 4
_PLENTY = 4 * _AT_A_TIME
"""Free pages per running request from which a decode may take several."""
_NO_PAGES = np.array([], dtype=np.intp)


class RequestPages:
    """Who has which pages."""

    def __init__(self, pages: PageAllocator, rows: RequestRows, *, prefix_caching: bool) -> None:
        """Take pages from this allocator, which nobody else may use."""
        self._pages, self._rows, self._prefix_caching = pages, rows, prefix_caching
        self._updates: list[PageUpdate] = []
        self.num_twins = 0
        """Pages exchanged for equal ones of others: only then do running requests come to share more."""

    def missing(self, request: Request, num_tokens: int) -> int:
        """Pages that the request needs besides its own to hold so many tokens."""
        return self._pages.pages_for(num_tokens) - len(request.pages)

    def cached_prefix(self, request: Request) -> IntArray:
        """Full pages that hold the first tokens of the request already."""
        # Prompt logprobs and pooled embeddings need the hidden states of every token of the prompt.
        needs_all = request.params is None or request.params.prompt_logprobs is not None
        if needs_all or not self._prefix_caching:
            return _NO_PAGES
        tokens, output = request.prompt_ids, request.output_ids
        if output:
            tokens = np.concatenate([tokens, output])
        return np.array(self._pages.match(tokens), dtype=np.intp)

    def start(self, request: Request, prefix: IntArray, count: int) -> None:
        """Give a request that has moved in a cached prefix, and room for `count` tokens behind it."""
        rows, row = self._rows, request.row
        cached = len(prefix) * self._pages.page_size
        self._pages.share(prefix, request.num_tokens)
        self._extend(request, prefix)
        self.take(request, self.missing(request, cached + count))
        rows.num_computed[row] = rows.num_scheduled[row] = cached
        rows.num_committed_pages[row] = len(prefix)
        if not self._prefix_caching:
            rows.never_commit(row)

    def take(self, request: Request, count: int) -> None:
        """Give the request so many free pages."""
        self._extend(request, np.array(self._pages.allocate(count), dtype=np.intp))

    def grow(self, requests: Sequence[Request], num_running: int) -> None:
        """Give each of these a page at least; there must be as many free."""
        # As long as there is plenty, several at a time: each change costs an upload.
        counts = [1] * len(requests)
        if self._pages.num_free > _PLENTY * num_running:
            longest = [self.missing(request, int(self._rows.max_tokens[request.row])) for request in requests]
            counts = [min(_AT_A_TIME, wanted) for wanted in longest]
        taken, end = np.array(self._pages.allocate(sum(counts)), dtype=np.intp), 0
        for request, count in zip(requests, counts, strict=True):
            end += count
            self._extend(request, taken[end - count : end])

    def commit_full(self, rows: IntArray, computed: IntArray) -> bool:
        """Offer pages that have become full as prefixes. Whether one came free, for its like was there."""
        if not self._prefix_caching:
            return False
        full = computed // self._pages.page_size
        behind = full > self._rows.num_committed_pages[rows]
        if not np.count_nonzero(behind):
            return False
        freed = [self._commit(row) for row in rows[behind].tolist()]
        return any(freed)

    def leave(self, request: Request) -> None:
        """Take all pages from the request."""
        self._pages.free(request.pages)
        request.pages = []

    def shared_prefix(self, requests: Sequence[Request]) -> int:
        """So many tokens all of these begin with, in the same pages. O(R log pages).

        Whoever shares a page shares all before it (Note [Exact prefixes] in cache/pages.py), so the end is
        found by bisection. Shared pages are full and computed: the next token of each stands behind them.
        """
        if len(requests) < 2:
            return 0
        first = requests[0].pages
        num_pages = min(len(request.pages) for request in requests)

        def is_own(at: int) -> bool:
            return any(request.pages[at] != first[at] for request in requests)

        return bisect_left(range(num_pages), True, key=is_own) * self._pages.page_size

    def take_updates(self) -> tuple[PageUpdate, ...]:
        """What has changed since the last call."""
        updates = tuple(self._updates)
        self._updates.clear()
        return updates

    def put_back_updates(self, updates: Sequence[PageUpdate]) -> None:
        """These were taken, and the step that was to apply them may not have done so: they are due again."""
        self._updates[:0] = updates

    def _extend(self, request: Request, pages: IntArray) -> None:
        if len(pages):
            self._updates.append(PageUpdate(request.row, len(request.pages), pages))
            request.pages += pages.tolist()
            self._rows.capacity[request.row] = len(request.pages) * self._pages.page_size

    def _commit(self, row: int) -> bool:
        rows, size = self._rows, self._pages.page_size
        request = rows.requests[row]
        assert request is not None
        has_freed = False
        first, last = int(rows.num_committed_pages[row]), request.num_computed // size
        for at, content in enumerate(
            self._pages.contents(rows.token_ids[row, first * size : last * size]), first
        ):
            parent = request.pages[at - 1] if at else RESERVED_PAGE
            page = self._pages.commit(request.pages[at], parent, content)
            if page != request.pages[at]:
                # Steps in flight still read the page given up: it holds the same.
                request.pages[at] = page
                self._updates.append(PageUpdate(row, at, np.array([page])))
                self.num_twins += 1
                has_freed = True
        rows.num_committed_pages[row] = last
        return has_freed
