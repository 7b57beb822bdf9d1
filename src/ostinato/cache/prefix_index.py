"""Finds cached pages by the tokens they hold.

Note [Exact prefixes]
Every page that is entered gets its own number, which is never reused. It is found under the key (number of
the page before it, bytes of its token ids); the number before the first page is 0. A dictionary compares
keys, not only hashes, so by induction over the pages a hit means that every token from the start of the
request is equal. A page whose predecessor has left can no longer be found, whatever has taken the place of
that predecessor: its number is gone.

A salt precedes the bytes of a first page, and so everything found after it: requests with different salts, or
with and without one, share nothing. All pages have the same length, so no salt can be mistaken for tokens.

Note [Blocks]
A prompt of 32,768 tokens has 2,048 pages, and looking each of them up takes as long as a third of a decode
step. So 16 consecutive pages that begin at a multiple of 16 can also be found in one lookup, under the number
of the page before them and the bytes of all their tokens, and so can 16 such blocks in a row. A page may be
in several blocks, which differ after it, and takes their entries with it when it leaves; blocks in larger
ones do likewise. Each size has its own index, because a salt before the first block makes its length
arbitrary.

Without its block a page is still found, only more slowly. So blocks may be entered later than their pages,
when nobody waits (`catch_up`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from .prefix_runs import PrefixRuns

IntArray = np.ndarray[Any, np.dtype[Any]]

_BLOCK = 16
_LARGE = _BLOCK * _BLOCK
_ID = np.dtype(np.int32)
_Key = tuple[int, bytes]
_FEW_DUE = 4
"""A lookup leaves up to this many due blocks unentered."""


class PrefixIndex:
    """Which page holds which tokens after which page."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        """For pages below `num_pages` of `page_size` tokens each; page 0 means: no page before."""
        self._page_size = page_size
        self._bytes_of = {
            count: np.dtype(f"V{count * page_size * _ID.itemsize}") for count in (1, _BLOCK, _LARGE)
        }
        self._page_of: dict[_Key, int] = {}
        self._key_of: dict[int, _Key] = {}
        self._pages_of: dict[_Key, IntArray] = {}
        self._blocks_with: dict[int, tuple[_Key] | set[_Key]] = {}
        """By page; a set if there are several, which differ after it."""
        self._block_ending: dict[int, _Key] = {}
        """By its last page."""
        self._pages_of_large: dict[_Key, IntArray] = {}
        self._blocks_of: dict[_Key, list[_Key]] = {}
        """The blocks of each large one."""
        self._large_with: defaultdict[_Key, set[_Key]] = defaultdict(set)
        self._due: dict[int, None] = {}
        """Last pages of blocks that are not entered yet."""
        self._runs = PrefixRuns(page_size)
        self._numbers = [0] * num_pages
        self._numbers_in_index = np.zeros(num_pages, dtype=np.int64)
        """The same for pages in the index, 0 for all others."""
        self._num_entered = self._num_left = 0
        self._parents = [0] * num_pages
        self._places = [-1] * num_pages
        """How many pages precede each in its chain."""

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    @property
    def pages(self) -> list[int]:
        """All pages in it."""
        return list(self._key_of)

    def contents(self, token_ids: Sequence[int] | IntArray, num_pages: int = 1) -> list[bytes]:
        """The token ids of each full page, or of `num_pages` full pages together, as bytes to compare."""
        size = num_pages * self._page_size
        count = len(token_ids) // size
        if not count:
            return []
        ids = np.ascontiguousarray(token_ids[: count * size], dtype=_ID)
        if count == 1:
            return [ids.tobytes()]
        found: list[bytes] = ids.view(self._bytes_of[num_pages]).tolist()
        return found

    def find(self, token_ids: Sequence[int] | IntArray, salt: bytes = b"") -> IntArray:
        """The pages of the longest known prefix of these tokens, under a salt."""
        ids = np.ascontiguousarray(token_ids, dtype=_ID)
        start = self.contents(ids[: self._page_size])
        page = self._page_of.get((0, salt + start[0] if salt else start[0])) if start else None
        if page is None:
            return np.array([], dtype=np.intp)
        first = self._numbers[page]
        known = self._runs.find(first, ids, self._numbers_in_index, self._num_left)
        if known is None or not len(known):
            known = np.array([page], dtype=np.intp)
        if len(self._due) > _FEW_DUE:
            self.catch_up()
        found = self._with_pages_behind(known, ids, salt)
        if found is not known:
            self._runs.note(first, ids, found, self._numbers_in_index, self._num_left)
        return found

    def _with_pages_behind(self, known: IntArray, ids: IntArray, salt: bytes) -> IntArray:
        """All pages of the longest known prefix of these tokens, of which `known` are given."""
        while True:
            for length, blocks in ((_LARGE, self._pages_of_large), (_BLOCK, self._pages_of)):
                known = self._with_blocks_behind(known, ids, salt, length, blocks)
            # Another whole block would have been found, unless it is due.
            begin, end = len(known), (len(known) // _BLOCK + 1) * _BLOCK
            before, pages = self._numbers[known.item(-1)], list[int]()
            for content in self.contents(ids[begin * self._page_size : end * self._page_size]):
                page = self._page_of.get((before, content))
                if page is None:
                    break
                pages.append(page)
                before = self._numbers[page]
            if pages:
                known = np.concatenate([known, pages])
            if len(known) < end:
                return known

    def _with_blocks_behind(
        self, known: IntArray, ids: IntArray, salt: bytes, length: int, blocks: dict[_Key, IntArray]
    ) -> IntArray:
        """The same, as far as blocks of `length` pages go; one may begin inside the known pages."""
        begin = len(known) // length * length
        size, end, found = self._page_size, begin + length, list[IntArray]()
        if end * size > len(ids):
            return known
        before = self._numbers[known.item(begin - 1)] if begin else 0
        while end * size <= len(ids):
            [content] = self.contents(ids[(end - length) * size : end * size], length)
            block = blocks.get((before, salt + content if salt and end == length else content))
            if block is None:
                break
            found.append(block)
            before, end = self._numbers[block.item(-1)], end + length
        return np.concatenate([known[:begin], *found]) if found else known

    def behind(self, parent: int, content: bytes) -> int | None:
        """The page that holds these tokens after `parent`."""
        return self._page_of.get((self._numbers[parent], content))

    def enter(self, page: int, parent: int, content: bytes) -> None:
        """Make `page` findable after `parent`, which is in the index or 0."""
        size = self._page_size * _ID.itemsize
        is_full = len(content) >= size if parent == 0 else len(content) == size  # the first may have a salt
        assert is_full, "only a full page can be shared"
        assert page not in self._key_of, "a page is committed once"
        assert parent == 0 or parent in self._key_of, "the page before must be committed"
        key = self._numbers[parent], content
        self._num_entered += 1
        self._numbers[page] = self._num_entered
        self._parents[page], self._places[page] = parent, self._places[parent] + 1
        self._page_of[key], self._key_of[page] = page, key
        self._numbers_in_index[page] = self._num_entered
        if self._places[page] % _BLOCK == _BLOCK - 1:
            self._due[page] = None

    def enter_row(self, pages: Sequence[int], parent: int, contents: Sequence[bytes]) -> None:
        """`enter` consecutive pages, none of which was found there before."""
        size = self._page_size * _ID.itemsize
        has_salt = parent == 0 and len(contents[0]) > size
        assert set(map(len, contents[has_salt:])) <= {size}, "only a full page can be shared"
        assert self._key_of.keys().isdisjoint(pages), "a page is committed once"
        assert parent == 0 or parent in self._key_of, "the page before must be committed"
        before, keys, place, first = parent, [], self._places[parent] + 1, self._num_entered + 1
        for at, (page, content) in enumerate(zip(pages, contents, strict=True)):
            keys.append((self._numbers[before], content))
            self._num_entered += 1
            self._numbers[page], self._places[page] = self._num_entered, place + at
            self._parents[page] = before
            before = page
        self._page_of.update(zip(keys, pages, strict=True))
        self._key_of.update(zip(pages, keys, strict=True))
        self._numbers_in_index[pages] = np.arange(first, first + len(pages))
        self._due.update(dict.fromkeys(pages[-(place + 1) % _BLOCK :: _BLOCK]))

    def catch_up(self) -> None:
        """Enter the blocks that are due."""
        try:
            for page in self._due:
                self._enter_block(self._row_to(page))
                if self._places[page] % _LARGE == _LARGE - 1:
                    self._enter_large_block(page)
            self._due.clear()
        except BaseException:
            # A partly entered block would not leave with its pages. All are due again.
            self._forget_blocks()
            ends = [page for page in self._key_of if self._places[page] % _BLOCK == _BLOCK - 1]
            self._due.update(dict.fromkeys(sorted(ends, key=self._numbers.__getitem__)))
            raise

    def remove(self, pages: Sequence[int]) -> None:
        """Make these pages unfindable, and so the pages after them."""
        self._num_left += len(pages)
        for key in map(self._key_of.pop, pages):
            del self._page_of[key]
        self._numbers_in_index[pages] = 0
        for page in pages:
            self._due.pop(page, None)
            for block in tuple(self._blocks_with.get(page, ())):
                self._remove_block(block)

    def clear(self) -> None:
        """Forget everything."""
        self._page_of.clear()
        self._key_of.clear()
        self._numbers_in_index[:] = 0
        self._runs.clear()
        self._forget_blocks()

    def _forget_blocks(self) -> None:
        self._due.clear()
        self._pages_of.clear()
        self._blocks_with.clear()
        self._block_ending.clear()
        self._pages_of_large.clear()
        self._blocks_of.clear()
        self._large_with.clear()

    def parent_of(self, page: int) -> int | None:
        """The page before one in the index, 0 for the first of a chain; None if that page has left."""
        parent = self._parents[page]
        is_there = parent in self._key_of or parent == 0
        return parent if is_there and self._numbers[parent] == self._key_of[page][0] else None

    def is_sound(self) -> bool:
        """Whether its parts agree with each other."""
        if {page: key for key, page in self._page_of.items()} != self._key_of:
            return False
        numbers = {page: self._numbers[page] for page in self._key_of}
        listed = np.flatnonzero(self._numbers_in_index).tolist()
        if {page: self._numbers_in_index.item(page) for page in listed} != numbers:
            return False
        if not self._due.keys() <= self._key_of.keys() - self._block_ending.keys():
            return False
        members = {(page, key) for key, pages in self._pages_of.items() for page in pages.tolist()}
        known = {(page, key) for page, keys in self._blocks_with.items() for key in keys}
        ends = {pages.item(-1): key for key, pages in self._pages_of.items()}
        if members != known or not self._blocks_with.keys() <= self._key_of.keys():
            return False
        large = {(key, of) for of, keys in self._blocks_of.items() for key in keys}
        known_large = {(key, of) for key, found in self._large_with.items() for of in found}
        is_each = self._blocks_of.keys() == self._pages_of_large.keys()
        return ends == self._block_ending and is_each and large == known_large

    def _row_to(self, last: int) -> list[int]:
        """The pages of the block that ends here; none if one of them has left."""
        parents, numbers, key_of = self._parents, self._numbers, self._key_of
        block, page = [last], last
        for _ in range(_BLOCK - 1):  # inlined `parent_of`: its calls would take longer than all the rest
            parent = parents[page]
            if numbers[parent] != key_of[page][0] or (parent not in key_of and parent):
                return []
            block.append(parent)
            page = parent
        return block[::-1]

    def _enter_block(self, block: Sequence[int]) -> None:
        if not block:
            return
        key = _joined([self._key_of[page] for page in block])
        self._pages_of[key] = np.array(block, dtype=np.intp)
        self._block_ending[block[-1]] = key
        alone, blocks_with = (key,), self._blocks_with
        if blocks_with.keys().isdisjoint(block):
            blocks_with.update(dict.fromkeys(block, alone))
            return
        for page in block:
            others = blocks_with.setdefault(page, alone)
            if type(others) is set:
                others.add(key)
            elif others is not alone:
                blocks_with[page] = {*others, key}

    def _enter_large_block(self, last: int) -> None:
        blocks: list[_Key] = []
        page: int | None = last
        while len(blocks) < _BLOCK:
            block = None if page is None else self._block_ending.get(page)
            if block is None:
                return
            blocks.append(block)
            page = self.parent_of(self._pages_of[block].item(0))
        blocks.reverse()
        key = _joined(blocks)
        self._pages_of_large[key] = np.concatenate([self._pages_of[block] for block in blocks])
        self._blocks_of[key] = blocks
        for block in blocks:
            self._large_with[block].add(key)

    def _remove_block(self, block: _Key) -> None:
        pages = self._pages_of.pop(block).tolist()
        del self._block_ending[pages[-1]]
        for page in pages:
            others = self._blocks_with[page]
            if type(others) is set and len(others) > 1:
                others.remove(block)
            else:
                del self._blocks_with[page]
        for large in self._large_with.pop(block, ()):
            del self._pages_of_large[large]
            for other in self._blocks_of.pop(large):
                if other != block:
                    self._large_with[other].remove(large)


def _joined(keys: Sequence[_Key]) -> _Key:
    """The key of consecutive pages or blocks."""
    return keys[0][0], b"".join([content for _, content in keys])
