"""The capture sizes: a sorted list of rungs to which batches are padded."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import overload

from ..errors import BatchError, ConfigError

Band = tuple[int, int | None, int]
"""(first rung, last rung or None for no end, step)"""

# From 64 on by 32: a rung at every power of two and at most 31 padded rows.
_DENSE: tuple[Band, ...] = ((1, 32, 1), (64, None, 32))
# The lists that users of SGLang and vLLM know, so that numbers can be compared with theirs.
_SGLANG: tuple[Band, ...] = (
    (1, 2, 1),
    (4, 12, 4),
    (16, 256, 8),
    (272, 512, 16),
    (544, None, 32),
)
_VLLM: tuple[Band, ...] = ((1, 2, 1), (4, 4, 4), (8, 248, 8), (256, None, 16))
_PREFILL: tuple[Band, ...] = (
    (4, 32, 4),
    (48, 256, 16),
    (288, 512, 32),
    (576, 1024, 64),
    (1280, 4096, 256),
    (4608, None, 512),
)


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_limit(limit: int) -> None:
    if not _is_positive_int(limit):
        raise ConfigError(f"the limit of a ladder must be a positive integer, not {limit!r}")


def _check_histogram(histogram: Mapping[int, int]) -> None:
    for size, times in histogram.items():
        if not _is_positive_int(size):
            raise ConfigError(f"a batch size must be a positive integer, not {size!r}")
        if times != 0 and not _is_positive_int(times):
            raise ConfigError(f"size {size} was seen {times!r} times: counts are integers of at least 0")
    if not any(histogram.values()):
        raise ConfigError("the histogram is empty: no batch was observed")


class Ladder(Sequence[int]):
    """Capture sizes in ascending order, immutable. Above the last rung, the limit, nothing is captured."""

    __slots__ = ("_sizes",)

    def __init__(self, sizes: Iterable[int]) -> None:
        """Take explicit sizes, in any order: positive integers, none of them twice."""
        if not isinstance(sizes, Iterable):
            raise ConfigError(f"a ladder is a list of sizes, not {sizes!r}")
        given = list(sizes)
        if not given:
            raise ConfigError("a ladder needs at least one size")
        for size in given:
            if not _is_positive_int(size):
                raise ConfigError(f"a capture size must be a positive integer, not {size!r}")
        ascending = sorted(given)
        for size, following in pairwise(ascending):
            if size == following:
                raise ConfigError(f"capture size {size} is listed twice")
        self._sizes = tuple(ascending)

    @classmethod
    def of(cls, sizes: Iterable[int] | Ladder) -> Ladder:
        """A ladder as it is, or one made of a list of sizes."""
        return sizes if isinstance(sizes, Ladder) else cls(sizes)

    @classmethod
    def _from_bands(cls, limit: int, bands: Iterable[Band]) -> Ladder:
        _check_limit(limit)
        sizes: list[int] = []
        for first, last, step in bands:
            end = limit if last is None else min(last + 1, limit)
            sizes += range(first, end, step)
        return cls([*sizes, limit])

    @classmethod
    def dense(cls, max_bs: int) -> Ladder:
        """1..32, then 64 and on by 32: small batches are never padded."""
        return cls._from_bands(max_bs, _DENSE)

    @classmethod
    def sglang(cls, max_bs: int) -> Ladder:
        """SGLang's decode list: 1, 2, 4, 8, 12, 16..256 by 8, 272..512 by 16, then by 32."""
        return cls._from_bands(max_bs, _SGLANG)

    @classmethod
    def vllm(cls, max_size: int) -> Ladder:
        """vLLM's list: 1, 2, 4, 8..248 by 8, 256 and on by 16."""
        return cls._from_bands(max_size, _VLLM)

    @classmethod
    def prefill(cls, max_tokens: int) -> Ladder:
        """SGLang's prefill tokens: by 4 to 32, 16 to 256, 32 to 512, 64 to 1024, 256 to 4096, then 512."""
        return cls._from_bands(max_tokens, _PREFILL)

    @classmethod
    def every(cls, n: int) -> Ladder:
        """1..n: nothing is ever padded."""
        return cls._from_bands(n, ((1, None, 1),))

    @classmethod
    def fit(cls, histogram: Mapping[int, int], rungs: int, *, limit: int | None = None) -> Ladder:
        """The ladder of at most `rungs` rungs with the least padded work for the observed sizes.

        `histogram` maps a batch size to how often it was seen. The last rung is `limit`, by default the
        largest size seen. The result is exact. Among equally good ladders it is the one with the fewest
        rungs, then the one that is smallest when compared from the last rung down.
        """
        _check_histogram(histogram)
        if not _is_positive_int(rungs):
            raise ConfigError(f"a ladder needs at least one rung, not {rungs!r}")
        sizes = sorted(size for size, times in histogram.items() if times)
        if limit is None:
            limit = sizes[-1]
        _check_limit(limit)
        if sizes[-1] > limit:
            raise ConfigError(f"size {sizes[-1]} was observed above the limit {limit}")
        counts = [histogram[size] for size in sizes]
        if sizes[-1] < limit:
            sizes.append(limit)
            counts.append(0)
        return cls(_least_padded_work(sizes, counts, rungs))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rungs in ascending order."""
        return self._sizes

    @property
    def limit(self) -> int:
        """The last rung."""
        return self._sizes[-1]

    def round_up(self, n: int) -> int | None:
        """The smallest rung that holds n; None above the limit."""
        if n < 1:
            raise BatchError(f"a batch has a size of at least 1, not {n}")
        at = bisect_left(self._sizes, n)
        return self._sizes[at] if at < len(self._sizes) else None

    def up_to(self, limit: int) -> Ladder:
        """The rungs below `limit`, and `limit` itself as the last one, also where that extends the ladder."""
        _check_limit(limit)
        return Ladder([*self._sizes[: bisect_left(self._sizes, limit)], limit])

    def scaled(self, query_len: int) -> Ladder:
        """The same rungs counted in tokens, for requests of `query_len` tokens each."""
        if not _is_positive_int(query_len):
            raise ConfigError(f"the query length must be a positive integer, not {query_len!r}")
        return Ladder([size * query_len for size in self._sizes])

    def descending(self) -> tuple[int, ...]:
        """The rungs from the largest down: the order of capture."""
        return self._sizes[::-1]

    def padded_work(self, histogram: Mapping[int, int]) -> int:
        """Rows computed for these observed sizes when each is padded to its rung."""
        _check_histogram(histogram)
        work = 0
        for size, times in histogram.items():
            rung = self.round_up(size)
            if rung is not None:
                work += times * rung
            elif times:
                raise ConfigError(f"size {size} is above the last rung {self.limit}: it is never padded")
        return work

    def waste(self, histogram: Mapping[int, int]) -> float:
        """The share of the computed rows that is padding, from 0 to below 1."""
        padded = self.padded_work(histogram)
        real = sum(size * times for size, times in histogram.items())
        return (padded - real) / padded

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self._sizes[index]

    def __contains__(self, size: object) -> bool:
        if not isinstance(size, int):
            return False
        at = bisect_left(self._sizes, size)
        return at < len(self._sizes) and self._sizes[at] == size

    def __eq__(self, other: object) -> bool:
        return self._sizes == other._sizes if isinstance(other, Ladder) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._sizes)

    def __repr__(self) -> str:
        return f"Ladder({list(self._sizes)})"


def _least_padded_work(sizes: Sequence[int], counts: Sequence[int], rungs: int) -> list[int]:
    """The best `rungs` of the ascending `sizes`, the last of them included. Only the last count may be 0.

    Note [Fitting a ladder]
    A rung that is no observed size can be moved down to the next one below it at no loss, so rungs are
    chosen among `sizes`. A further rung at an observed size always saves work, so the best ladder has
    exactly min(rungs, len(sizes)) rungs, and no ladder with fewer is as good.

    With `below[i]` the batches of the first i sizes, the least work for the first j sizes with k rungs,
    the last of them at size j, is

        work[k][j] = min over i < j of  work[k-1][i] + (below[j] - below[i]) * size[j]

    so, at x = size[j], the lowest of the lines  y = work[k-1][i] - below[i] * x,  plus a term without i.
    Lines arrive with i, hence with strictly falling slopes (every count but the last is positive, and no
    line starts at the last size); queries come at growing x. The lowest line can then only move to later
    ones, so a queue holds the lower hull, lines leave it at the front for good, and a row costs
    O(len(sizes)). All of it is integer arithmetic. A line leaves the front only for one that is strictly
    lower, and a line hidden from the hull ties at most where an earlier line of the hull ties as well:
    of equally good rungs the smaller one is taken.
    """
    if rungs >= len(sizes):
        return list(sizes)
    below = list(accumulate(counts, initial=0))
    # Index j counts sizes: work[j] is for the first j of them, whose last is sizes[j - 1].
    work = [0] + [below[j] * sizes[j - 1] for j in range(1, len(sizes) + 1)]
    rows_of_previous: list[list[int]] = []
    for k in range(2, rungs + 1):
        hull: deque[int] = deque()
        # With k rungs the first k - 1 sizes have no entry; `work` keeps stale numbers there, never read.
        next_work = list(work)
        previous = [0] * len(work)
        for j in range(k, len(sizes) + 1):
            line = j - 1
            while len(hull) >= 2 and _is_hidden(hull[-1], hull[-2], line, below, work):
                hull.pop()
            hull.append(line)
            x = sizes[j - 1]
            while len(hull) >= 2 and work[hull[1]] - below[hull[1]] * x < work[hull[0]] - below[hull[0]] * x:
                hull.popleft()
            best = hull[0]
            previous[j] = best
            next_work[j] = work[best] + (below[j] - below[best]) * x
        work = next_work
        rows_of_previous.append(previous)
    at = len(sizes)
    chosen = [sizes[at - 1]]
    for previous in reversed(rows_of_previous):
        at = previous[at]
        chosen.append(sizes[at - 1])
    return chosen[::-1]


def _is_hidden(middle: int, left: int, right: int, below: Sequence[int], work: Sequence[int]) -> bool:
    """Whether `right` takes over from `left` no later than `middle` does: then `middle` is never needed."""
    right_rise, right_fall = work[right] - work[left], below[right] - below[left]
    middle_rise, middle_fall = work[middle] - work[left], below[middle] - below[left]
    return right_rise * middle_fall <= middle_rise * right_fall
