"""The capture sizes: a sorted list of rungs to which batches are padded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import BatchError, ConfigError

Band = tuple[int, int | None, int]
"""(first rung, last rung or None if open-ended, step)"""

# From 64 on by 32: a rung at every power of two and at most 31 padded rows.
_DENSE: tuple[Band, ...] = ((1, 32, 1), (64, None, 32))
# The lists that users of SGLang and vLLM know, so that numbers can be compared with theirs.
_SGLANG: tuple[Band, ...] = ((1, 2, 1), (4, 12, 4), (16, 256, 8), (272, 512, 16), (544, None, 32))
_VLLM: tuple[Band, ...] = ((1, 2, 1), (4, 4, 4), (8, 248, 8), (256, None, 16))
_PREFILL: tuple[Band, ...] = (
    (4, 32, 4),
    (48, 256, 16),
    (288, 512, 32),
    (576, 1024, 64),
    (1280, 4096, 256),
    (4608, None, 512),
)


def plain_int(value: Any) -> Any:
    """Returns Python's own integer for NumPy's, and anything else as it is."""
    return int(value) if isinstance(value, np.integer) else value


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_limit(limit: int) -> None:
    if not _is_positive_int(limit):
        raise ConfigError(f"the limit of a ladder must be a positive integer, not {limit!r}")


class Ladder(tuple[int, ...]):
    """Capture sizes in ascending order, immutable. The last rung is the limit: nothing larger is captured."""

    __slots__ = ()

    def __new__(cls, sizes: Iterable[int]) -> Ladder:
        """Make a ladder from explicit sizes in any order: positive integers without duplicates."""
        if not isinstance(sizes, Iterable):
            raise ConfigError(f"a ladder must be a list of sizes, not {sizes!r}")
        given = list(map(plain_int, sizes))
        if not given:
            raise ConfigError("a ladder needs at least one size")
        for size in given:
            if not _is_positive_int(size):
                raise ConfigError(f"a capture size must be a positive integer, not {size!r}")
        ascending = sorted(given)
        for size, following in pairwise(ascending):
            if size == following:
                raise ConfigError(f"capture size {size} is listed twice")
        return super().__new__(cls, ascending)

    @classmethod
    def of(cls, sizes: Iterable[int] | Ladder) -> Ladder:
        """Return a ladder as it is, or make one from a list of sizes."""
        return sizes if isinstance(sizes, Ladder) else cls(sizes)

    @classmethod
    def _from_bands(cls, limit: int, bands: Iterable[Band]) -> Ladder:
        limit = plain_int(limit)
        _check_limit(limit)
        sizes: list[int] = []
        for first, last, step in bands:
            end = limit if last is None else min(last + 1, limit)
            sizes += range(first, end, step)
        return cls([*sizes, limit])

    @classmethod
    def dense(cls, max_bs: int) -> Ladder:
        """1..32, then from 64 by 32: small batches are never padded."""
        return cls._from_bands(max_bs, _DENSE)

    @classmethod
    def sglang(cls, max_bs: int) -> Ladder:
        """SGLang's decode list: 1, 2, 4, 8, 12, 16..256 by 8, 272..512 by 16, then by 32."""
        return cls._from_bands(max_bs, _SGLANG)

    @classmethod
    def vllm(cls, max_size: int) -> Ladder:
        """vLLM's list: 1, 2, 4, 8..248 by 8, then from 256 by 16."""
        return cls._from_bands(max_size, _VLLM)

    @classmethod
    def prefill(cls, max_tokens: int) -> Ladder:
        """SGLang's prefill tokens: by 4 to 32, 16 to 256, 32 to 512, 64 to 1024, 256 to 4096, then 512."""
        return cls._from_bands(max_tokens, _PREFILL)

    @classmethod
    def fit(cls, histogram: Mapping[int, int], rungs: int, *, limit: int | None = None) -> Ladder:
        """The ladder with at most `rungs` rungs that needs the least padding for the observed sizes.

        `histogram` maps batch sizes to how often they were seen. The last rung is `limit`, by default the
        largest size seen. Of equally good ladders it is the smallest, compared from the last rung down.
        """
        histogram = {plain_int(size): plain_int(times) for size, times in histogram.items()}
        rungs, limit = plain_int(rungs), plain_int(limit)
        for size, times in histogram.items():
            if not _is_positive_int(size):
                raise ConfigError(f"a batch size must be a positive integer, not {size!r}")
            if times != 0 and not _is_positive_int(times):
                raise ConfigError(f"the count of size {size} must be an integer of at least 0, not {times!r}")
        seen = {size: times for size, times in histogram.items() if times}
        if not seen:
            raise ConfigError("the histogram is empty: no batch was observed")
        if not _is_positive_int(rungs):
            raise ConfigError(f"a ladder needs at least one rung, not {rungs!r}")
        limit = max(seen) if limit is None else limit
        _check_limit(limit)
        if max(seen) > limit:
            raise ConfigError(f"size {max(seen)} was observed above the limit {limit}")
        # A rung that is no observed size can be moved down to the next one below it at no loss. least[j]: the
        # least work for all sizes up to the j-th, which is a rung; with one rung more in every round.
        sizes = np.array(sorted({*seen, limit}))
        seen_up_to = np.cumsum([seen.get(int(size), 0) for size in sizes])
        least = seen_up_to * sizes
        rung_before: list[list[int]] = []
        for _ in range(min(rungs, len(sizes)) - 1):
            ends = range(1, len(sizes))
            work = [least[:end] + (seen_up_to[end] - seen_up_to[:end]) * sizes[end] for end in ends]
            rung_before.append([-1, *(int(row.argmin()) for row in work)])
            least = np.array([least[0], *(row.min() for row in work)])
        chosen = [len(sizes) - 1]
        while rung_before and (before := rung_before.pop()[chosen[-1]]) >= 0:
            chosen.append(before)
        return cls([int(sizes[j]) for j in chosen])

    @property
    def limit(self) -> int:
        """The last rung."""
        return self[-1]

    def round_up(self, n: int) -> int | None:
        """The smallest rung that holds n; None above the limit."""
        if n < 1:
            raise BatchError(f"the size of a batch must be at least 1, not {n}")
        at = bisect_left(self, n)
        return self[at] if at < len(self) else None

    def __repr__(self) -> str:
        return f"Ladder({list(self)})"
