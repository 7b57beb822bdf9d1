"""Which graphs a mode and its ladders make."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from dispatched_graphs import (
    FULL,
    FULL_AND_PIECEWISE,
    FULL_DECODE_ONLY,
    NONE,
    PIECEWISE,
    full,
    full_mixed,
    piecewise,
)

from ostinato.graphs.dispatching.dispatch import Dispatcher
from ostinato.graphs.dispatching.keys import capture_keys, capture_order
from ostinato.graphs.dispatching.ladder import Ladder
from ostinato.graphs.dispatching.mode import GraphMode
from ostinato.graphs.errors import ConfigError

DECODE, TOKENS = Ladder([1, 2, 4]), Ladder([8, 16])


@pytest.mark.parametrize(
    ("mode", "count"),
    [
        (NONE, 0),
        (PIECEWISE, 2 * 3),
        (FULL, (3 + 2) * 3 * 2),
        (FULL_DECODE_ONLY, 3 * 3 * 2),
        (FULL_AND_PIECEWISE, 3 * 3 * 2 + 2 * 3),
    ],
)
def test_key_counts_per_mode(mode: GraphMode, count: int) -> None:
    keys = capture_keys(
        mode, DECODE, TOKENS, query_len=2, max_reqs=4, lora_cases=(0, 1, 4), context_buckets=(64, None)
    )
    assert len(keys) == len(set(keys)) == count
    accepting = Dispatcher(mode, query_len=2)
    for key in keys:
        accepting.add(key)
    in_use = accepting.live
    assert {*in_use} == {*keys}
    assert [key.descriptor for key in in_use] == sorted(key.descriptor for key in keys)


@pytest.mark.parametrize("of", [list, tuple, np.array])
def test_lists_of_sizes_will_do_and_so_will_integers_of_numpy(of: Callable[[list[int]], list[int]]) -> None:
    keys = capture_keys(FULL_AND_PIECEWISE, of([4, 1, 2]), of([8, 16]), max_reqs=np.int64(4))
    assert keys == capture_keys(FULL_AND_PIECEWISE, DECODE, TOKENS, max_reqs=4)
    assert all(type(key.descriptor.num_reqs) is int for key in keys)


def test_keys_are_captured_largest_first() -> None:
    assert capture_keys(FULL_AND_PIECEWISE, Ladder([1, 8]), Ladder([4, 8]), max_reqs=8) == [
        full(8),
        piecewise(8, 8),
        piecewise(4, 4),
        full(1),
    ]
    keys = capture_keys(
        FULL,
        Ladder(range(1, 41)),
        Ladder.prefill(64),
        max_reqs=40,
        lora_cases=(0, 4, 1),
        context_buckets=(8, None, 64),
    )
    for earlier, later in pairwise(keys):
        assert earlier.descriptor.num_tokens >= later.descriptor.num_tokens
    biggest = [key.descriptor for key in keys[:9]]
    assert [(d.lora, d.context) for d in biggest] == [(n, c) for n in (4, 1, 0) for c in (None, 64, 8)]


def test_the_keys_of_each_path() -> None:
    assert capture_keys(FULL, Ladder([2]), Ladder([8, 2]), query_len=3, max_reqs=4, context_buckets=(9,)) == [
        full_mixed(8, 4, context=9),
        full(2, 3, context=9),
        full_mixed(2, 2, context=9),
    ]
    # Attention is outside of a piecewise graph: one graph serves every context.
    assert capture_keys(PIECEWISE, None, Ladder([8]), max_reqs=4, context_buckets=(9, 99)) == [
        piecewise(8, 4)
    ]


def test_decode_keys_for_cascade_attention_are_made_when_asked_for() -> None:
    assert capture_keys(FULL_AND_PIECEWISE, Ladder([2]), Ladder([8]), max_reqs=2, cascade=True) == [
        piecewise(8, 2),
        full(2, cascade=True),
        full(2),
    ]
    keys = capture_keys(
        FULL, DECODE, TOKENS, max_reqs=4, lora_cases=(0, 1), context_buckets=(8, None), cascade=True
    )
    assert len(keys) == len(set(keys)) == (3 * 2 + 2) * 2 * 2
    # Attention is outside of a piecewise graph.
    assert capture_keys(PIECEWISE, None, Ladder([8]), max_reqs=4, cascade=True) == [piecewise(8, 4)]


def test_keys_with_extras_of_any_type_have_an_order_of_capture() -> None:
    keys = [full(size, extra=extra) for size in (2, 4) for extra in ("a", None, 1)]
    assert len({capture_order(key) for key in keys}) == 6
    assert [key.descriptor.num_reqs for key in sorted(keys, key=capture_order)] == [4, 4, 4, 2, 2, 2]


@pytest.mark.parametrize(
    ("mode", "decode", "tokens", "missing"),
    [
        (FULL, None, TOKENS, "decode ladder"),
        (FULL_DECODE_ONLY, None, TOKENS, "decode ladder"),
        (FULL_AND_PIECEWISE, None, TOKENS, "decode ladder"),
        (FULL, DECODE, None, "token ladder"),
        (FULL_AND_PIECEWISE, DECODE, None, "token ladder"),
        (PIECEWISE, DECODE, None, "token ladder"),
    ],
)
def test_a_missing_ladder_is_named(
    mode: GraphMode, decode: Ladder | None, tokens: Ladder | None, missing: str
) -> None:
    with pytest.raises(ConfigError, match=f"{mode.name} .* needs a {missing}"):
        capture_keys(mode, decode, tokens, max_reqs=4)


def test_ladders_that_a_mode_does_not_need_may_be_missing() -> None:
    assert capture_keys(NONE, None, None, max_reqs=4) == []
    assert capture_keys(FULL_DECODE_ONLY, DECODE, None, max_reqs=4) == [full(4), full(2), full(1)]


def test_capture_keys_refuses_contradictions() -> None:
    with pytest.raises(ConfigError, match="never more"):
        capture_keys(FULL_DECODE_ONLY, DECODE, None, max_reqs=3)
    with pytest.raises(ConfigError, match="max_reqs"):
        capture_keys(NONE, None, None, max_reqs=0)
    for cases in ([], [0, 0], [-1]):
        with pytest.raises(ConfigError):
            capture_keys(FULL_DECODE_ONLY, DECODE, None, max_reqs=4, lora_cases=cases)
    for buckets in ([], [None, None], [0]):
        with pytest.raises(ConfigError):
            capture_keys(FULL_DECODE_ONLY, DECODE, None, max_reqs=4, context_buckets=buckets)
