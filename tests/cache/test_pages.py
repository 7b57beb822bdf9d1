"""Who owns a page, what it holds, and what is evicted."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ostinato.cache.pages import OutOfPages, PageAllocator, PageIntegrityError
from ostinato.cache.prefix_index import PrefixIndex

SIZE = 4


def commit_chain(pages: PageAllocator, owned: list[int], token_ids: list[int]) -> list[int]:
    """Commit all full pages of a request from the first on, as the scheduler does."""
    contents = pages.contents(token_ids)
    owned[: len(contents)] = pages.commit_row(owned[: len(contents)], 0, contents)
    return owned


def cached(pages: PageAllocator, token_ids: list[int]) -> list[int]:
    """Compute, commit and free a request of these tokens; the pages it had."""
    owned = commit_chain(pages, pages.allocate(pages.pages_for(len(token_ids))), token_ids)
    pages.free(owned)
    return owned


def match(pages: PageAllocator, token_ids: list[int], salt: bytes = b"") -> list[int]:
    """The pages that are found, as a list."""
    found: list[int] = pages.match(token_ids, salt).tolist()
    return found


def test_page_zero_is_never_handed_out() -> None:
    pages = PageAllocator(6, SIZE)
    assert sorted(pages.allocate(5)) == [1, 2, 3, 4, 5]
    with pytest.raises(OutOfPages, match="1 pages were requested, 0 of 5 are free"):
        pages.allocate(1)


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 16), (0, 16), (4, 0)])
def test_a_cache_without_usable_pages_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        PageAllocator(num_pages, page_size)


def test_a_failed_allocation_takes_nothing() -> None:
    pages = PageAllocator(4, SIZE)
    with pytest.raises(OutOfPages):
        pages.allocate(4)
    assert pages.num_free == 3


@pytest.mark.parametrize(
    ("prompt_len", "hit_pages"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (20, 3)]
)
def test_a_match_leaves_at_least_one_token_to_compute(prompt_len: int, hit_pages: int) -> None:
    pages = PageAllocator(10, SIZE)
    chain = cached(pages, list(range(12)))
    assert match(pages, list(range(prompt_len))) == chain[:hit_pages]


def test_equal_tokens_behind_a_different_beginning_do_not_match() -> None:
    pages = PageAllocator(10, SIZE)
    cached(pages, [1, 1, 1, 1, 7, 7, 7, 7])
    assert match(pages, [2, 2, 2, 2, 7, 7, 7, 7, 0]) == []
    assert match(pages, [7, 7, 7, 7, 0]) == []


class SameHash(bytes):
    """Content that differs and hashes alike."""

    def __hash__(self) -> int:
        return 7


def test_tokens_with_equal_hashes_do_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = PrefixIndex.contents
    monkeypatch.setattr(
        PrefixIndex, "contents", lambda self, *ids: [SameHash(each) for each in contents(self, *ids)]
    )
    pages = PageAllocator(10, SIZE)
    chain = cached(pages, [1, 1, 1, 1])
    assert match(pages, [2, 2, 2, 2, 0]) == []
    assert match(pages, [1, 1, 1, 1, 0]) == chain


def test_a_page_whose_predecessor_is_gone_is_not_found_behind_another_in_its_place() -> None:
    """A request that gives up its beginning leaves a page behind a page number that others may get."""
    pages = PageAllocator(4, SIZE)
    first, second = commit_chain(pages, pages.allocate(2), [1, 1, 1, 1, 7, 7, 7, 7])
    pages.free([first])
    [_, again] = pages.allocate(2)
    assert again == first
    commit_chain(pages, [first], [2, 2, 2, 2])
    assert match(pages, [2, 2, 2, 2, 7, 7, 7, 7, 0]) == [first]
    pages.check_integrity([[second], [first], [_]], chains_are_whole=False)


def test_pages_in_a_row_are_exchanged_for_their_twins_as_far_as_there_are_any() -> None:
    tokens = np.random.default_rng(0).integers(0, 9, 2 * 300).tolist()
    other = [*tokens[:400], *[9] * 200]
    pages = PageAllocator(700, 2)
    first = commit_chain(pages, pages.allocate(300), tokens)
    mine = pages.allocate(300)
    second = commit_chain(pages, mine.copy(), other)
    assert second == first[:200] + mine[200:]
    pages.check_integrity([first, second])
    assert pages.statistics.twins == 200
    assert pages.statistics.commits == 400
    assert match(pages, [*tokens, 0]) == first
    assert match(pages, [*other, 0]) == second
    pages.free(first)
    pages.free(second)
    pages.check_integrity([])
    pages.check_integrity([pages.allocate(699 - 150)])
    assert pages.num_cached == 150


def test_a_shared_page_is_free_when_its_last_owner_leaves() -> None:
    pages = PageAllocator(4, SIZE)
    chain = cached(pages, [1, 2, 3, 4])
    for _ in range(2):
        pages.share(pages.match([1, 2, 3, 4, 5]), 5)
    assert pages.num_free == 2
    pages.free(chain)
    assert pages.num_free == 2
    pages.free(chain)
    assert pages.num_free == 3
    pages.check_integrity([])


def test_empty_pages_are_used_before_cached_ones_are_evicted() -> None:
    pages = PageAllocator(5, SIZE)
    chain = cached(pages, [1, 2, 3, 4])
    taken = pages.allocate(3)
    assert chain[0] not in taken
    assert pages.statistics.evictions == 0
    assert pages.allocate(1) == chain
    assert pages.statistics.evictions == 1
    assert match(pages, [1, 2, 3, 4, 5]) == []


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pages = PageAllocator(3, SIZE)
    first, second = cached(pages, [1, 1, 1, 1]), cached(pages, [2, 2, 2, 2])
    pages.share(first, 5)
    pages.free(first)
    assert pages.allocate(1) == second
    assert match(pages, [1, 1, 1, 1, 0]) == first


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pages = PageAllocator(4, SIZE)
    chain = cached(pages, list(range(12)))
    pages.allocate(1)
    assert match(pages, list(range(13))) == chain[:2]


def test_a_request_that_computed_a_known_page_gets_the_twin() -> None:
    pages = PageAllocator(6, SIZE)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    one, other = pages.allocate(2), pages.allocate(2)
    commit_chain(pages, one, tokens)
    assert pages.num_free == 1
    commit_chain(pages, other, tokens)
    assert other == one
    assert pages.num_free == 3
    assert pages.statistics.twins == 2
    pages.check_integrity([one, other])


def test_statistics_count_tokens() -> None:
    pages = PageAllocator(6, SIZE)
    cached(pages, [1, 2, 3, 4])
    pages.share(pages.match([1, 2, 3, 4, 5, 6, 7, 8]), 8)
    assert (pages.statistics.hit_tokens, pages.statistics.queried_tokens) == (4, 8)
    assert pages.statistics.hit_rate == 0.5
    assert pages.statistics.commits == 1
    assert PageAllocator(2).statistics.hit_rate == 0.0


def test_a_flush_forgets_content_but_not_owners() -> None:
    pages = PageAllocator(6, SIZE)
    cached(pages, [1, 2, 3, 4])
    owned = commit_chain(pages, pages.allocate(1), [5, 6, 7, 8])
    pages.flush()
    assert pages.num_cached == 0
    assert match(pages, [1, 2, 3, 4, 0]) == match(pages, [5, 6, 7, 8, 0]) == []
    pages.check_integrity([owned])
    pages.free(owned)
    assert pages.num_free == 5
    pages.check_integrity([])


def test_a_flush_leaves_shared_pages_with_all_their_owners() -> None:
    pages = PageAllocator(6, SIZE)
    chain = cached(pages, [1, 2, 3, 4])
    for _ in range(2):
        pages.share(chain, 5)
    pages.flush()
    pages.check_integrity([chain, chain])
    pages.free(chain)
    pages.free(chain)
    pages.check_integrity([])


def test_a_prefix_that_is_used_all_the_time_leaves_no_trace() -> None:
    pages = PageAllocator(8, SIZE)
    busy, idle = cached(pages, list(range(12))), cached(pages, [7] * 4)
    for _ in range(100):
        pages.share(busy, 13)
        pages.free(busy)
        pages.check_integrity([])
    assert pages._num_entries <= 2 * pages.num_pages
    assert len(pages._evictable) <= 2 * pages.num_pages
    pages.allocate(3)
    assert pages.allocate(4) == [*idle, *reversed(busy)]


def test_entries_of_pages_that_are_used_again_go_and_the_order_of_eviction_stays() -> None:
    pages = PageAllocator(40, SIZE)
    idle, busy = cached(pages, [7] * 4), cached(pages, list(range(80)))
    for number in range(20):
        pages.share(busy[: 20 - number % 2], 81)  # now and then its end is left
        pages.catch_up()
        pages.check_integrity([busy[: 20 - number % 2]])
        pages.free(busy[: 20 - number % 2])
        assert pages._num_entries <= 1 + 20 + 20
    taken = pages.allocate(18)
    assert pages.allocate(21) == [*idle, busy[-1], *reversed(busy[:-1])]
    pages.flush()
    pages.free(taken)


def test_long_prefixes_are_found_block_by_block() -> None:
    pages = PageAllocator(1200, SIZE)
    tokens = list(range(600 * SIZE))
    chain = cached(pages, tokens)
    for count in (
        0,
        1,
        15,
        16,
        17,
        32,
        47,
        48,
        69,
        70,
        255,
        256,
        257,
        271,
        272,
        511,
        512,
        513,
        528,
        599,
        600,
    ):
        assert match(pages, [*tokens[: count * SIZE], -1]) == chain[:count]
        assert match(pages, [*tokens[: count * SIZE + 1], -1, *tokens[count * SIZE + 2 :]]) == chain[:count]
    taken = pages.allocate(1199 - 300)
    assert match(pages, [*tokens, -1]) == chain[:300], "the last 300 were evicted, and with them their blocks"
    pages.check_integrity([taken])
    taken += pages.allocate(200)
    assert match(pages, [*tokens, -1]) == chain[:100]
    pages.check_integrity([taken])


def test_one_more_way_on_behind_a_page_costs_the_same_as_the_first() -> None:
    """Prompts that begin alike and end differently, thousands of them, as a long conversation has them."""
    index, ways = PrefixIndex(6020, 1), 6000
    for page in range(1, 16):
        index.enter(page, page - 1, page.to_bytes(4, "little"))
    seconds = []
    for way in range(ways):
        began = time.perf_counter()
        index.enter(16 + way, 15, way.to_bytes(4, "little"))
        seconds.append(time.perf_counter() - began)
    assert min(seconds[-200:]) < 4 * min(seconds[200:400])
    assert index.is_sound()
    assert index.find([*range(1, 16), 77]).tolist() == [*range(1, 16), 16 + 77]
    for way in range(1, ways):
        index.remove([16 + way])
    assert index.is_sound()
    assert index.find([*range(1, 16), 0]).tolist() == [*range(1, 16), 16]
    index.remove([3])
    assert index.is_sound()
    assert index.find([*range(1, 16), 0]).tolist() == [1, 2]


def test_the_large_block_found_last_is_no_other_and_goes_with_its_pages() -> None:
    index, size = PrefixIndex(1200, 1), 256
    ids = np.arange(3 * size, dtype=np.int32)
    other = np.concatenate([ids[:size], ids[size:] + 5000])
    index.enter_row(list(range(1, 3 * size + 1)), 0, index.contents(ids))
    index.enter_row(list(range(800, 800 + size)), size, index.contents(other[size : 2 * size]))
    for _ in range(2):
        assert index.find(ids).tolist() == list(range(1, 3 * size + 1))
        assert index.find(other).tolist() == [*range(1, size + 1), *range(800, 800 + size)]
        assert index.is_sound()
    changed = ids.copy()
    changed[size + 3] += 1
    assert index.find(changed).tolist() == list(range(1, size + 4))
    assert index.find(ids[: 2 * size - 1]).tolist() == list(range(1, 2 * size))
    index.find(ids)
    index.remove(list(range(size + 1, 3 * size + 1))[::-1])
    assert index.is_sound()
    assert index.find(ids).tolist() == list(range(1, size + 1))
    assert index.find(other).tolist() == [*range(1, size + 1), *range(800, 800 + size)]
    index.clear()
    assert not index.find(ids).tolist()


def test_a_salt_is_never_taken_for_tokens() -> None:
    """Though with it the first of 16 pages is as long as 256 are."""
    pages = PageAllocator(600, SIZE)
    tokens = list(range(256 * SIZE))
    before, behind = np.array(tokens[: 240 * SIZE], dtype=np.int32).tobytes(), tokens[240 * SIZE :]
    cached(pages, tokens)
    assert match(pages, [*behind, -1], before) == []


def test_a_few_pages_at_a_time_are_evicted_in_their_order() -> None:
    """However many lost their owner together, and though some were used again since."""
    pages = PageAllocator(301, SIZE)
    tokens = list(range(300 * SIZE))
    chain = cached(pages, tokens)
    again = chain[:90]
    pages.share(again, 1)
    pages.free(again)
    order = [*reversed(chain[90:]), *reversed(again)]
    evicted: list[int] = []
    for count in (1, 3, 70, 100, 1, 60, 65):
        evicted += pages.allocate(count)
        assert evicted == order[: len(evicted)]
        pages.check_integrity([evicted])
    assert pages.num_free == 0


def test_pages_in_use_are_evicted_in_their_turn_once_they_are_free() -> None:
    """Though they were unused, and used again, while others came and went often."""
    pages = PageAllocator(8, SIZE)
    held, busy = cached(pages, list(range(8))), cached(pages, [7] * 4)
    pages.share(held, 9)
    for _ in range(100):
        pages.share(busy, 5)
        pages.free(busy)
        pages.check_integrity([held])
    pages.free(held)
    pages.check_integrity([])
    assert pages.allocate(7)[-3:] == [*busy, *reversed(held)]


def test_a_private_page_cannot_be_shared() -> None:
    pages = PageAllocator(6, SIZE)
    with pytest.raises(AssertionError, match="never committed"):
        pages.share(pages.allocate(1), 5)


def test_integrity_names_a_leaked_page() -> None:
    pages = PageAllocator(4, SIZE)
    pages.allocate(1)
    with pytest.raises(PageIntegrityError, match="page 1 is leaked: 1 references, 0 owners"):
        pages.check_integrity([])


def test_integrity_names_a_page_owned_twice() -> None:
    pages = PageAllocator(4, SIZE)
    owned = pages.allocate(1)
    with pytest.raises(PageIntegrityError, match="page 1 is owned without a reference: 1 references, 2"):
        pages.check_integrity([owned, owned])


def test_integrity_names_a_lost_page() -> None:
    pages = PageAllocator(4, SIZE)
    pages._empty.remove(2)
    with pytest.raises(PageIntegrityError, match="page 2 is in 0 places"):
        pages.check_integrity([])


def test_integrity_names_an_eviction_in_the_wrong_order() -> None:
    pages = PageAllocator(4, SIZE)
    first, second = cached(pages, list(range(8)))
    [unused] = pages._evictable
    unused.pages[:] = [first, second]
    with pytest.raises(PageIntegrityError, match=f"page {first} would be evicted before page {second}"):
        pages.check_integrity([])


def test_freeing_twice_is_caught() -> None:
    pages = PageAllocator(4, SIZE)
    owned = pages.allocate(1)
    pages.free(owned)
    with pytest.raises(AssertionError, match="has no owner"):
        pages.free(owned)


class Pages(RuleBasedStateMachine):
    """Random requests over few pages; what `match` finds must hold exactly the tokens asked for."""

    num_pages, page_size = 9, 2

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(self.num_pages, self.page_size)
        self.owners: list[list[int]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def serve(self, token_ids: list[int]) -> None:
        self.compute(token_ids)

    def compute(self, token_ids: list[int]) -> None:
        size = self.page_size
        found = match(self.pages, token_ids)
        for at, page in enumerate(found):
            assert self.content[page] == tuple(token_ids[: size * at + size])
        needed = self.pages.pages_for(len(token_ids)) - len(found)
        if needed + self.pages.num_unowned(found) > self.pages.num_free:
            return
        self.pages.share(found, len(token_ids))
        owned = found + self.pages.allocate(needed)
        begin = len(found)
        # As a prompt in chunks, or a text that grows, would: first some pages, then the others.
        for end in (begin + (len(token_ids) // size - begin) // 2, len(token_ids) // size):
            contents = self.pages.contents(token_ids[size * begin : size * end])
            parent = owned[begin - 1] if begin else 0
            if end - begin == 1:
                committed = [self.pages.commit(owned[begin], parent, contents[0])]
            else:
                committed = self.pages.commit_row(owned[begin:end], parent, contents)
            for at, page in enumerate(committed, begin):
                prefix = tuple(token_ids[: size * at + size])
                assert page == owned[at] or self.content[page] == prefix
                self.content[page] = prefix
            owned[begin:end] = committed
            begin = end
        self.owners.append(owned)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.owners) - 1))
        self.pages.free(self.owners.pop(at))

    @rule()
    def catch_up(self) -> None:
        self.pages.catch_up()

    @rule()
    def flush(self) -> None:
        # Only between requests here: the scheduler's tests flush under running ones.
        if not self.owners:
            self.pages.flush()

    @invariant()
    def books_agree(self) -> None:
        self.pages.check_integrity(self.owners)


class LongPages(Pages):
    """Requests of up to five blocks of pages (Note [Blocks]), of which at most two fit."""

    num_pages, page_size = 150, 1

    @rule(beginning=st.integers(0, 1), length=st.integers(0, 80), end=st.lists(st.integers(0, 1), max_size=3))
    def serve_long(self, beginning: int, length: int, end: list[int]) -> None:
        self.compute([beginning + at // 7 for at in range(length)] + [3, *end])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def forget_beginning(self, data: st.DataObject) -> None:
        """As requests do that look back through windows only; then the order of eviction is theirs."""
        owned = self.owners[data.draw(st.integers(0, len(self.owners) - 1))]
        count = data.draw(st.integers(0, len(owned) // 2))
        self.pages.free(owned[:count])
        del owned[:count]

    @invariant()
    def books_agree(self) -> None:
        self.pages.check_integrity(self.owners, chains_are_whole=False)


TestLongPages = LongPages.TestCase
TestLongPages.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)

TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
