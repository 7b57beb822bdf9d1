"""Pages of the KV cache that a verification works in, and what they must hold.

A page has two numbers: its place among the borrowed ones, which everything here uses, and its number in the
cache. Slots are positions counted over pages: slot s is place s % 16 of page s // 16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ostinato.cache.kv import KVCache
from ostinato.cache.pages import PAGE_SIZE, RESERVED_PAGE

HOSTILE = 3.0e4
"""Fills what must not be read. Finite: unseen values have a weight of zero, and 0 x NaN is NaN."""
_ENORMOUS = 1.0e8
"""A value that no attention weight makes small."""
_HOSTILE_HALF = 300.0
"""The same in float16. Padding computes with it, and an overflow there ends as NaN on page 0."""


def choose_pages(num_pages: int, count: int, generator: np.random.Generator) -> list[int]:
    """This many pages of a cache, in random order: half from its beginning, half from its end.

    The neighbours of most are among them, so a write one page too far shows as a change. The last pages have
    the largest addresses, where 32-bit sums would overflow.
    """
    low = count // 2
    chosen = [*range(1, 1 + low), *range(num_pages - (count - low), num_pages)]
    order: list[int] = generator.permutation(chosen).tolist()
    return order


class BorrowedPages:
    """Some pages of a cache, with the keys and values that belong there."""

    def __init__(self, kv: KVCache, pages: Sequence[int]) -> None:
        self.numbers = tuple(pages)
        """Numbers in the cache, by place."""
        self._caches = [*kv.k, *kv.v]
        self._num_layers = len(kv.k)
        self.hostile = _HOSTILE_HALF if kv.shape.dtype is torch.float16 else HOSTILE
        device = self._caches[0].device
        self._pages = torch.tensor(self.numbers, device=device)
        self._expected = [cache.new_zeros(len(pages), *cache.shape[1:]) for cache in self._caches]
        self._rest = torch.zeros((), dtype=torch.int64, device=device)

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """At the end the pages, and page 0, hold what they held before."""
        pages = torch.cat([self._pages, self._pages.new_tensor([RESERVED_PAGE])])
        # In the host's memory: next to weights, cache and graphs a GPU may have little left.
        held = [cache.index_select(0, pages).cpu() for cache in self._caches]
        self._rest = self._sum_of_rest()
        try:
            yield
        finally:
            for cache, content in zip(self._caches, held, strict=True):
                cache.index_copy_(0, pages, content.to(cache.device))

    def expect(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Set what belongs at these slots of a layer, [n, Hkv, D] each."""
        for at, new in ((layer, keys), (self._num_layers + layer, values)):
            expected = self._expected[at]
            expected.flatten(0, 1).index_copy_(0, slots, new.to(expected.dtype))

    def write_all(self) -> None:
        """Write everything where it belongs."""
        for cache, expected in zip(self._caches, self._expected, strict=True):
            cache.index_copy_(0, self._pages, expected)

    def write(self, slots: Tensor) -> None:
        """Write what belongs at these slots."""
        places = self._places(slots)
        for cache, expected in zip(self._caches, self._expected, strict=True):
            content = expected.flatten(0, 1).index_select(0, slots)
            cache.flatten(0, 1).index_copy_(0, places, content)

    def spoil(self, slots: Tensor) -> None:
        """Make these slots look as if an earlier owner had left large numbers."""
        places = self._places(slots)
        for cache in self._caches:
            cache.flatten(0, 1).index_fill_(0, places, self.hostile)

    def spoil_values(self, slots: Tensor) -> None:
        """Make the values at these slots enormous, in all layers; the keys stay."""
        places = self._places(slots)
        for cache in self._caches[self._num_layers :]:
            cache.flatten(0, 1).index_fill_(0, places, min(_ENORMOUS, torch.finfo(cache.dtype).max / 2))

    def fill_page_0(self, value: float) -> None:
        """Fill what padding reads with this."""
        for cache in self._caches:
            cache[RESERVED_PAGE].fill_(value)

    def errors(self, slots: Tensor) -> Tensor:
        """The largest error of a token's keys or values in any layer, relative to their length, by slot."""
        places = self._places(slots)
        largest = torch.zeros(slots.numel(), dtype=torch.float32, device=slots.device)
        for cache, expected in zip(self._caches, self._expected, strict=True):
            found = cache.flatten(0, 1).index_select(0, places).flatten(1).float()
            right = expected.flatten(0, 1).index_select(0, slots).flatten(1).float()
            largest = torch.fmax(largest, relative_errors(found, right))
        return largest

    def num_not_spoilt(self, slots: Tensor) -> int:
        """How many of these slots hold anything other than what `spoil` left there."""
        places = self._places(slots)
        changed = torch.zeros(slots.numel(), dtype=torch.bool, device=slots.device)
        for cache in self._caches:
            hostile = torch.tensor(self.hostile, dtype=cache.dtype, device=cache.device)
            changed |= (cache.flatten(0, 1).index_select(0, places) != hostile).flatten(1).any(-1)
        return int(changed.sum())

    def num_changed(self) -> int:
        """Slots of borrowed pages that do not hold, bit for bit, what they should."""
        changed = torch.zeros(len(self.numbers), PAGE_SIZE, dtype=torch.bool, device=self._pages.device)
        for cache, expected in zip(self._caches, self._expected, strict=True):
            changed |= (cache.index_select(0, self._pages) != expected).flatten(2).any(-1)
        return int(changed.sum())

    def has_rest_changed(self) -> bool:
        """Whether anything outside the borrowed pages and page 0 differs from the beginning."""
        return not torch.equal(self._rest, self._sum_of_rest())

    def _sum_of_rest(self) -> Tensor:
        total = torch.zeros((), dtype=torch.int64, device=self._pages.device)
        for cache in self._caches:
            lent = _sum_of_bits(cache.index_select(0, self._pages)) + _sum_of_bits(cache[RESERVED_PAGE])
            total = total + _sum_of_bits(cache) - lent
        return total

    def _places(self, slots: Tensor) -> Tensor:
        return self._pages[slots // PAGE_SIZE] * PAGE_SIZE + slots % PAGE_SIZE


def _sum_of_bits(cache: Tensor) -> Tensor:
    """Equal for equal contents; any single change shows."""
    return cache.flatten().view(torch.int64).sum()


def relative_errors(found: Tensor, right: Tensor) -> Tensor:
    """|found - right| / |right| of each row; infinite where a number is NaN."""
    errors = (found - right).norm(dim=1) / right.norm(dim=1).clamp(min=1e-30)
    return errors.nan_to_num(nan=float("inf"), posinf=float("inf"))
