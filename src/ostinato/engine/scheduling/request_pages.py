"""The pages of running requests: taken, shared by prefix, committed when full, given back.

A request's pages are recorded in two places: its row of `RequestRows` (its pages, and the tokens that they
can hold), and the page table on the device. The former changes at once; changes for the device are collected
for the next step.

Note [Windows]
If every layer of a model looks back on a limited number of tokens (`SchedulerConfig.window`), pages before
all windows are never read again. A request gives them back while it runs: its row and the page table then
have page 0 in their place. Steps under way may still read them, as in Note [One step ahead]. With prefix
caching a page is committed first, and the last committed one stays, because the next is entered after it.
Kernels read keys in blocks, so the pages given back end at a multiple of `WINDOW_ALIGNMENT`: page 0 is never
read instead.

If one layer sees everything, all pages stay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from ostinato.cache.pages import RESERVED_PAGE, PageAllocator
from ostinato.kernels.attention.batch import WINDOW_ALIGNMENT

from .request import IntArray, Request, RequestRows
from .scheduled_step import PageUpdate
from .scheduler_config import SchedulerConfig

_AT_A_TIME = 4
_PLENTY = 4 * _AT_A_TIME
"""Free pages per running request from which a decode may take several."""
_NO_PAGES = np.array([], dtype=np.intp)


class RequestPages:
    """Which request has which pages."""

    def __init__(self, pages: PageAllocator, rows: RequestRows, config: SchedulerConfig) -> None:
        """Take pages from this allocator, which nothing else may use."""
        self._pages, self._rows, self._prefix_caching = pages, rows, config.prefix_caching
        self._window, self._max_drafts = config.window, config.max_drafts
        self._most_at_once = most_pages_at_once(config, pages)
        self._updates: list[PageUpdate] = []
        self.num_twins = 0
        """Pages exchanged for equal ones of others: only then can running requests come to share more."""

    def missing(self, request: Request, num_tokens: int) -> int:
        """Pages that the request needs besides its own to hold this many tokens."""
        return self._pages.pages_for(num_tokens) - self._count(request.row)

    def missing_at_once(self, request: Request, num_tokens: int) -> int:
        """The same, less what it will have given back by then."""
        missing = self.missing(request, num_tokens)
        return missing if self._most_at_once is None else min(missing, self._most_at_once)

    def cached_prefix(self, request: Request) -> IntArray:
        """Full pages that already hold the first tokens of the request."""
        if not self._prefix_caching or _needs_all(request):
            return _NO_PAGES
        tokens, output = request.prompt_ids, request.output_ids
        if output:
            tokens = np.concatenate([tokens, output])
        prefix = self._pages.match(tokens, _salt(request))
        if self._window is not None and len(prefix):
            needed = self._first_needed(np.array(len(prefix) * self._pages.page_size))
            prefix[: min(int(needed), len(prefix) - 1)] = RESERVED_PAGE
        return prefix

    def start(self, request: Request, prefix: IntArray, count: int) -> None:
        """Give a request that has moved in a cached prefix, and room for `count` tokens after it."""
        rows, row = self._rows, request.row
        cached = len(prefix) * self._pages.page_size
        self._pages.share(prefix, request.num_tokens)
        new = np.array(
            self._pages.allocate(self.missing(request, cached + count) - len(prefix)), dtype=np.intp
        )
        self._extend(request, np.concatenate([prefix, new]) if len(prefix) else new)
        rows.num_computed[row] = rows.num_scheduled[row] = cached
        rows.num_committed_pages[row] = len(prefix)
        if self._window is not None:
            rows.num_given_back[row] = len(prefix) - np.count_nonzero(prefix)  # counted as page 0
        if not self._prefix_caching:
            rows.never_commit(row)

    def take(self, request: Request, count: int) -> None:
        """Give the request this many free pages."""
        self._extend(request, np.array(self._pages.allocate(count), dtype=np.intp))

    def grow(self, requests: Sequence[Request], num_running: int) -> None:
        """Give each of these at least a page; as many must be free."""
        # If there are plenty, give several at a time: each change costs an upload.
        counts = [1] * len(requests)
        if self._pages.num_free > _PLENTY * num_running:
            ends = [int(self._rows.max_tokens[request.row]) + self._max_drafts for request in requests]
            longest = [self.missing(request, end) for request, end in zip(requests, ends, strict=True)]
            counts = [min(_AT_A_TIME, wanted) for wanted in longest]
        taken, end = np.array(self._pages.allocate(sum(counts)), dtype=np.intp), 0
        for request, count in zip(requests, counts, strict=True):
            end += count
            self._extend(request, taken[end - count : end])

    def commit_full_of(self, row: int, computed: int) -> bool:
        """Offer pages of this row that have become full as prefixes. True if a page became free because an
        equal one was there."""
        if not self._prefix_caching:
            return False
        is_behind = computed // self._pages.page_size > self._rows.num_committed_pages.item(row)
        return is_behind and self._commit(row)

    def commit_full(self, rows: IntArray, computed: IntArray) -> bool:
        """The same for several rows."""
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
        row = request.row
        self._pages.free(self._rows.pages[row, self._rows.num_given_back[row] : self._count(row)])
        self._rows.capacity[row] = 0

    def give_back(self, requests: Sequence[Request]) -> bool:
        """Take from these the pages that no future token can see. True if there were any."""
        if self._window is None or not requests:
            return False
        rows = np.array([request.row for request in requests], dtype=np.intp)
        # With drafts it is unknown how many will be accepted.
        begun = self._rows.num_computed if self._max_drafts else self._rows.num_scheduled
        needed = self._first_needed(begun[rows])
        ends = np.minimum(needed, self._rows.num_committed_pages[rows] - 1)
        begins = self._rows.num_given_back[rows]
        ready = np.flatnonzero(ends > begins).tolist()
        for at in ready:
            row, begin, end = requests[at].row, int(begins[at]), int(ends[at])
            self._pages.free(self._rows.pages[row, begin:end])
            self._rows.pages[row, begin:end] = RESERVED_PAGE
            self._rows.num_given_back[row] = end
            self._updates.append(PageUpdate(row, begin, np.full(end - begin, RESERVED_PAGE)))
        return bool(ready)

    def _first_needed(self, positions: IntArray) -> IntArray:
        """The first page that tokens at or after these positions can see."""
        assert self._window is not None
        first = np.maximum(0, positions - self._window + 1)
        return first // WINDOW_ALIGNMENT * WINDOW_ALIGNMENT // self._pages.page_size

    def shared_prefix(self, requests: Sequence[Request]) -> int:
        """How many tokens all of these begin with, in the same pages. O(R log pages).

        Requests that share a page share all before it (Note [Exact prefixes] in cache/pages.py), so the end
        is found by bisection. Shared pages are full and computed: each request's next token comes after them.
        """
        if len(requests) < 2 or self._window is not None:
            return 0
        rows, pages = [request.row for request in requests], self._rows.pages
        num_pages = int(self._rows.capacity[rows].min()) // self._pages.page_size

        def is_own(at: int) -> bool:
            return bool(np.any(pages[rows, at] != pages[rows[0], at]))

        return bisect_left(range(num_pages), True, key=is_own) * self._pages.page_size

    def take_updates(self) -> tuple[PageUpdate, ...]:
        """The changes since the last call."""
        updates = tuple(self._updates)
        self._updates.clear()
        return updates

    def put_back_updates(self, updates: Sequence[PageUpdate]) -> None:
        """These were taken, but the step that should apply them may not have done so: they are due again."""
        self._updates[:0] = updates

    def _count(self, row: int) -> int:
        """Pages of a row's tenant, including those given back."""
        return int(self._rows.capacity[row]) // self._pages.page_size

    def restore(self, running: Sequence[Request]) -> None:
        """Rebuild the books from these requests' rows, whatever their state; resend all to the device."""
        self._pages.restore([[page for page in request.pages if page] for request in running])
        for request in running:
            self._rows.never_commit(request.row)
        self._updates = [PageUpdate(request.row, 0, np.array(request.pages)) for request in running]
        self.num_twins += 1

    def _extend(self, request: Request, pages: IntArray) -> None:
        if len(pages):
            row, first = request.row, self._count(request.row)
            self._updates.append(PageUpdate(row, first, pages))
            self._rows.pages[row, first : first + len(pages)] = pages
            self._rows.capacity[row] += len(pages) * self._pages.page_size

    def _commit(self, row: int) -> bool:
        rows, size = self._rows, self._pages.page_size
        request, pages = rows.requests[row], rows.pages[row]
        assert request is not None
        first, last = int(rows.num_committed_pages[row]), int(rows.num_computed[row]) // size
        contents = self._pages.contents(rows.token_ids[row, first * size : last * size])
        if not first:
            contents[0] = _salt(request) + contents[0]
        own, parent = pages[first:last].tolist(), int(pages[first - 1]) if first else RESERVED_PAGE
        if len(own) == 1:
            committed = [self._pages.commit(own[0], parent, contents[0])]
        else:
            committed = self._pages.commit_row(own, parent, contents)
        num_twins = 0
        if committed != own:
            num_twins = sum(page != other for page, other in zip(committed, own, strict=True))
            # Steps in flight still read the exchanged pages: their contents are the same.
            pages[first : first + num_twins] = committed[:num_twins]
            self._updates.append(PageUpdate(row, first, np.array(committed[:num_twins])))
            self.num_twins += num_twins
        rows.num_committed_pages[row] = last
        return num_twins > 0


def _needs_all(request: Request) -> bool:
    # Prompt logprobs and pooled embeddings need the hidden states of every token of the prompt.
    params = request.params
    return params is None or params.prompt_logprobs is not None or params.skip_reading_prefix_cache


def _salt(request: Request) -> bytes:
    own = b"" if request.cache_salt is None else request.cache_salt.encode(errors="surrogatepass")
    return own if request.adapter is None else request.adapter.salt + own


def most_pages_at_once(config: SchedulerConfig, pages: PageAllocator) -> int | None:
    """An upper bound on the pages that a request of any length needs to continue; None: there is none."""
    if config.window is None:
        return None
    # A window that begins at a multiple; what one step adds, or with drafts all steps in flight; and the
    # pages at both ends that these only touch.
    num_steps = 1 + config.lookahead if config.max_drafts else 1
    added = num_steps * (config.max_batched_tokens + config.max_drafts)
    return pages.pages_for(config.window + WINDOW_ALIGNMENT + added) + 3


def longest_request(config: SchedulerConfig, pages: PageAllocator) -> int:
    """The most tokens that a request can have: max_model_len, or less if the KV cache is smaller."""
    most = most_pages_at_once(config, pages)
    if most is not None and most <= pages.num_usable:
        return config.max_model_len
    return min(config.max_model_len, pages.num_usable * pages.page_size - config.max_drafts)
