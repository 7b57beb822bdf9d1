"""Which pages hold the beginning of a prompt: with blocks and without them, and as prompts before it did."""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from ostinato.cache.prefix_index import PrefixIndex
from ostinato.cache.prefix_runs import MOST_RUNS


def of_blocks(index: PrefixIndex) -> tuple[int, int]:
    return len(index._pages_of), len(index._pages_of_large)


def test_pages_are_found_before_their_blocks_are_entered_and_as_far() -> None:
    """Few blocks wait for `catch_up`; many are entered by the first look that could need them."""
    index, size = PrefixIndex(1200, 1), 256
    ids = np.arange(2 * size + 40, dtype=np.int32)
    pages = list(range(1, len(ids) + 1))
    contents = index.contents(ids)
    index.enter_row(pages[:size], 0, contents[:size])
    assert of_blocks(index) == (0, 0)
    assert index.find(ids).tolist() == pages[:size]
    assert of_blocks(index) == (16, 1)
    for at in range(size, len(ids), 40):  # two or three blocks are due at a time
        end = min(at + 40, len(ids))
        index.enter_row(pages[at:end], pages[at - 1], contents[at:end])
        index._runs.clear()
        assert index.find(ids).tolist() == pages[:end]
        assert index._due
        assert index.is_sound()
        index.catch_up()
        assert not index._due
        assert index.is_sound()
        assert index.find(ids).tolist() == pages[:end]
    assert of_blocks(index) == (len(ids) // 16, 2)
    changed = ids.copy()
    for at in (0, 1, 15, 16, 255, 256, 300, 511, 512, 540):
        changed[at] += 5000
        assert index.find(changed).tolist() == pages[:at]
        changed[at] -= 5000
        assert index.find(changed).tolist() == pages


def test_a_block_that_is_due_leaves_with_its_pages() -> None:
    index, ids = PrefixIndex(100, 1), np.arange(48, dtype=np.int32)
    pages, contents = list(range(1, 49)), index.contents(ids)
    index.enter_row(pages, 0, contents)
    index.remove([20])
    index.catch_up()
    assert of_blocks(index) == (2, 0), "one has lost a page"
    assert index.find(ids).tolist() == pages[:19]
    index.remove([48])
    assert index.is_sound()
    # The same page, now the end of another block.
    index.enter_row([20, *range(60, 71), 48], 19, [*contents[19:31], contents[31]])
    index.catch_up()
    assert of_blocks(index) == (2, 0)
    assert index.find(ids).tolist() == [*pages[:19], 20, *range(60, 71), 48]
    assert index.is_sound()


def test_a_prompt_that_begins_as_one_before_has_the_pages_that_are_there_now() -> None:
    index, ids = PrefixIndex(400, 2), np.arange(200, dtype=np.int32)
    pages = list(range(1, 101))
    index.enter_row(pages, 0, index.contents(ids))
    salted = index.contents(ids)
    salted[0] = b"salt" + salted[0]
    index.enter_row(list(range(101, 201)), 0, salted)
    given = ids.copy()
    for _ in range(2):
        found = index.find(given)
        assert found.tolist() == pages
        found[:] = 0  # a caller may write to it
        given[2:] += 1000  # and to what was asked for
        assert index.find(given).tolist() == pages[:1]
        given = ids.copy()
        assert index.find(ids, b"salt").tolist() == list(range(101, 201))
        assert index.find(ids[:61]).tolist() == pages[:30]
        assert index.find(ids[:1]).tolist() == []
    index.remove([70])
    assert index.find(ids).tolist() == pages[:69]
    index.enter(70, 69, ids[138:140].tobytes())
    assert index.find(ids).tolist() == pages[:70], "those behind it are lost"
    index.enter_row(list(range(201, 231)), 70, index.contents(ids[140:]))
    assert index.find(ids).tolist() == [*pages[:70], *range(201, 231)]
    index.remove([1])
    assert index.find(ids).tolist() == []
    index.enter(1, 0, ids[:2].tobytes())
    assert index.find(ids).tolist() == [1]
    assert index.find(ids, b"salt").tolist() == list(range(101, 201))
    index.clear()
    assert index.find(ids, b"salt").tolist() == []


def test_no_more_runs_are_kept_than_their_number() -> None:
    index, ids = PrefixIndex(2000, 1), np.arange(16, dtype=np.int32)
    for number in range(MOST_RUNS + 9):
        own = ids + 100 * number
        first = 1 + 16 * number
        index.enter_row(list(range(first, first + 16)), 0, index.contents(own))
        assert len(index.find(own)) == 16
        assert len(index._runs._runs) == min(number + 1, MOST_RUNS)
    assert index.find(ids).tolist() == list(range(1, 17))


def entered_up_to(index: PrefixIndex, count: int | None, error: type[BaseException]) -> int:
    """Enter the blocks that are due, and fail after so many lines of it; how many were come by."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if event == "line" and frame.f_code.co_name != "catch_up":
            lines += 1
            if lines == count:
                raise error
        return trace if frame.f_code.co_filename.endswith("prefix_index.py") else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.nullcontext() if count is None else pytest.raises(error):
            index.catch_up()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_whatever_line_fails_where_blocks_are_entered_none_is_left_in_part(
    error: type[BaseException],
) -> None:
    """As such it would be found when its pages are gone."""
    ids = np.arange(272, dtype=np.int32)
    other = np.concatenate([ids[:240], ids[240:256] + 1000])

    def index_with_blocks_due() -> PrefixIndex:
        index = PrefixIndex(400, 1)
        index.enter_row(list(range(1, 257)), 0, index.contents(ids[:256]))
        index.catch_up()
        index.enter_row(list(range(257, 273)), 256, index.contents(ids[256:]))
        index.enter_row(list(range(300, 316)), 240, index.contents(other[240:]))
        return index

    num_lines = entered_up_to(index_with_blocks_due(), None, error)
    assert num_lines > 100
    for count in range(1, num_lines + 1):
        index = index_with_blocks_due()
        assert entered_up_to(index, count, error) == count
        assert index.is_sound()
        for blocks in ((0, 0), (18, 2)):
            assert of_blocks(index) == blocks
            index._runs.clear()
            assert index._with_pages_behind(np.array([1]), ids, b"").tolist() == list(range(1, 273))
            assert index._with_pages_behind(np.array([1]), other, b"").tolist() == [
                *range(1, 241),
                *range(300, 316),
            ]
            index.catch_up()
            assert index.is_sound()
        index.remove([250, 310])
        assert index.is_sound()
        assert index.find(ids).tolist() == list(range(1, 250))
        assert index.find(other).tolist() == [*range(1, 241), *range(300, 310)]
