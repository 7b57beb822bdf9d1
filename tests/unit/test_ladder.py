from collections.abc import Callable, Mapping
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.graphs.dispatching.ladder import Ladder
from ostinato.graphs.errors import BatchError, ConfigError

PRESETS: list[Callable[[int], Ladder]] = [
    Ladder.dense,
    Ladder.sglang,
    Ladder.vllm,
    Ladder.prefill,
]
histograms = st.dictionaries(st.integers(1, 40), st.integers(0, 9), min_size=1, max_size=9).filter(
    lambda histogram: any(histogram.values())
)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_climbs_to_its_limit(preset: Callable[[int], Ladder]) -> None:
    for limit in range(1, 1025):
        ladder = preset(limit)
        assert all(low < high for low, high in pairwise(ladder))
        assert ladder[-1] == ladder.limit == limit
        assert ladder[0] >= 1


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_rounds_up_to_the_next_rung(preset: Callable[[int], Ladder]) -> None:
    for limit in [*range(1, 80), 255, 256, 257, 512, 513, 1000, 1024]:
        ladder = preset(limit)
        for n in range(1, limit + 1):
            rung = ladder.round_up(n)
            assert rung == min(size for size in ladder if size >= n)
        assert ladder.round_up(limit + 1) is None


@pytest.mark.parametrize("preset", PRESETS)
def test_a_smaller_limit_only_cuts_a_preset(preset: Callable[[int], Ladder]) -> None:
    whole = preset(9000)
    for limit in [*range(1, 1025), 4096, 8192]:
        assert preset(limit) == Ladder([*(size for size in whole if size < limit), limit])


def test_the_lists_of_the_presets() -> None:
    assert Ladder.dense(128) == (*range(1, 33), 64, 96, 128)
    assert Ladder.dense(40) == (*range(1, 33), 40)
    assert Ladder.sglang(600) == (
        *(1, 2, 4, 8, 12),
        *range(16, 257, 8),
        *range(272, 513, 16),
        *(544, 576, 600),
    )
    assert Ladder.vllm(300) == (1, 2, 4, *range(8, 249, 8), 256, 272, 288, 300)
    assert Ladder.prefill(6000) == (
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *(4608, 5120, 5632, 6000),
    )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("limit", [0, -1, True, 2.0, "8"])
def test_a_preset_refuses_a_limit_that_is_no_positive_integer(
    preset: Callable[[int], Ladder], limit: int
) -> None:
    with pytest.raises(ConfigError, match="limit"):
        preset(limit)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], "at least one"),
        ([1, 2, 1], "1 is listed twice"),
        ([0, 1], "not 0"),
        ([-4], "not -4"),
        ([True], "not True"),
        ([1.0], "not 1.0"),
        (["8"], "not '8'"),
        ("12", "not '1'"),
        (8, "list of sizes, not 8"),
        (None, "list of sizes, not None"),
    ],
)
def test_explicit_sizes_are_validated(sizes: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ladder(sizes)


def test_integers_of_numpy_are_sizes() -> None:
    assert Ladder(np.arange(1, 4)) == Ladder([1, 2, 3])
    assert Ladder.dense(np.int32(40)) == Ladder.dense(40)
    assert Ladder.fit({np.int64(3): np.int64(2), 5: 1}, np.int64(2)) == Ladder([3, 5])
    assert all(type(size) is int for size in Ladder(np.arange(1, 4)))


@given(st.sets(st.integers(1, 500), min_size=1).flatmap(lambda sizes: st.permutations(sorted(sizes))))
def test_a_ladder_is_an_immutable_sequence(sizes: list[int]) -> None:
    ladder = Ladder(sizes)
    ascending = sorted(sizes)
    assert list(ladder) == ascending
    assert len(ladder) == len(sizes)
    assert ladder[0] == ascending[0]
    assert ladder[1:] == tuple(ascending[1:])
    assert {n for n in range(502) if n in ladder} == set(sizes)
    assert ladder == Ladder(ascending) == Ladder.of(ascending)
    assert hash(ladder) == hash(Ladder(ascending))
    assert ladder != Ladder([*ascending, 501])
    assert Ladder.of(ladder) is ladder
    assert eval(repr(ladder)) == ladder
    with pytest.raises(AttributeError):
        ladder.limit = 1  # type: ignore[misc]


@pytest.mark.parametrize("n", [0, -1])
def test_an_empty_batch_has_no_rung(n: int) -> None:
    with pytest.raises(BatchError):
        Ladder([1, 2]).round_up(n)


@pytest.mark.parametrize(
    "histogram", [{}, {4: 0}, {0: 1}, {-1: 1}, {True: 1}, {1.5: 1}, {1: -1}, {1: 0.5}, {1: True}]
)
def test_a_histogram_is_validated(histogram: dict[int, int]) -> None:
    with pytest.raises(ConfigError):
        Ladder.fit(histogram, 2)


def padded_work(ladder: Ladder, histogram: Mapping[int, int]) -> int:
    """Rows computed for these sizes when each is padded to its rung."""
    return sum(times * (ladder.round_up(size) or 0) for size, times in histogram.items())


def brute_force(histogram: Mapping[int, int], rungs: int, limit: int) -> Ladder:
    """The best of all ladders over all sizes up to the limit, not only observed ones."""
    best = None
    for extra in range(min(rungs, limit)):
        for below in combinations(range(1, limit), extra):
            ladder = Ladder([*below, limit])
            rank = (padded_work(ladder, histogram), len(ladder), ladder[::-1])
            if best is None or rank < best[0]:
                best = (rank, ladder)
    assert best is not None
    return best[1]


@given(
    st.dictionaries(st.integers(1, 10), st.integers(0, 4), min_size=1, max_size=7).filter(
        lambda h: any(h.values())
    ),
    st.integers(1, 5),
    st.integers(0, 2),
)
def test_fit_is_the_best_of_all_ladders(histogram: dict[int, int], rungs: int, room: int) -> None:
    largest = max(size for size, times in histogram.items() if times)
    assert Ladder.fit(histogram, rungs, limit=largest + room) == brute_force(histogram, rungs, largest + room)
    assert Ladder.fit(histogram, rungs) == brute_force(histogram, rungs, largest)


def best_by_quadratic_program(histogram: Mapping[int, int], rungs: int) -> int:
    """The least padded work, by the recurrence without any hull."""
    sizes = sorted(histogram)
    work: dict[int, float] = {0: 0}
    least = float("inf")
    for _ in range(rungs):
        work = {
            j: min(w + sum(histogram[s] for s in sizes[i:j]) * sizes[j - 1] for i, w in work.items() if i < j)
            for j in range(1, len(sizes) + 1)
            if any(i < j for i in work)
        }
        least = min(least, work.get(len(sizes), least))
    return int(least)


@given(
    st.dictionaries(st.integers(1, 10**6), st.integers(1, 10**12), min_size=1, max_size=25),
    st.integers(1, 27),
)
def test_fit_is_exact_for_large_numbers(histogram: dict[int, int], rungs: int) -> None:
    ladder = Ladder.fit(histogram, rungs)
    assert len(ladder) == min(rungs, len(histogram))
    assert padded_work(ladder, histogram) == best_by_quadratic_program(histogram, rungs)


@given(histograms)
def test_more_rungs_never_cost_more(histogram: dict[int, int]) -> None:
    works = [padded_work(Ladder.fit(histogram, rungs), histogram) for rungs in range(1, 12)]
    assert works == sorted(works, reverse=True)
    assert works[-1] == sum(size * times for size, times in histogram.items())


@given(histograms, st.integers(1, 6), st.integers(0, 5))
def test_fit_ends_at_the_limit_and_ignores_order(histogram: dict[int, int], rungs: int, room: int) -> None:
    limit = max(size for size, times in histogram.items() if times) + room
    ladder = Ladder.fit(histogram, rungs, limit=limit)
    assert ladder.limit == limit
    assert len(ladder) <= rungs
    assert Ladder.fit(dict(reversed(histogram.items())), rungs, limit=limit) == ladder


def test_fit_refuses_sizes_above_the_limit_and_no_rungs() -> None:
    with pytest.raises(ConfigError, match="9 was observed above the limit 8"):
        Ladder.fit({3: 1, 9: 1}, 2, limit=8)
    assert Ladder.fit({3: 1, 9: 0}, 2, limit=8) == (3, 8)
    for rungs in (0, -1, True, 1.5):
        with pytest.raises(ConfigError, match="rung"):
            Ladder.fit({3: 1}, rungs)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="limit"):
        Ladder.fit({3: 1}, 1, limit=0)


def test_fit_takes_the_smaller_rung_of_two_equal_ones() -> None:
    assert Ladder.fit({1: 1, 2: 2, 3: 1}, 2) == (2, 3)
    # Rungs (1, 3) and (2, 3) both compute 7 rows.
    assert Ladder.fit({1: 1, 2: 1, 3: 1}, 2) == (1, 3)


def test_fit_is_fast_enough_for_every_size_of_a_server() -> None:
    histogram = {size: 1 + size * 7919 % 1009 for size in range(1, 2049)}
    ladder = Ladder.fit(histogram, 32)
    assert len(ladder) == 32
    assert padded_work(ladder, histogram) < padded_work(Ladder(range(64, 4097, 64)), histogram)
