"""Graphs arranged for the search: the cheapest one that holds a batch, in O(log n)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..errors import ConfigError
from .descriptor import BatchDescriptor
from .keys import GraphKey
from .mode import GraphMode

Cost = Callable[[GraphMode, BatchDescriptor], float]
"""What one replay costs, for instance in measured milliseconds."""


class Need(NamedTuple):
    """A shape as the search sees it. Unlike a shape it can drop a requirement, even that of its size."""

    tokens: int
    reqs: int
    query_len: int | None
    lora: int
    context: int
    encoder: bool | None
    cascade: bool
    exact: bool


_Priced = tuple[tuple[Any, ...], BatchDescriptor]


class _Chain:
    """Graphs of growing tokens and requests: those that hold a batch are a suffix, its cheapest is known."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reqs: list[int] = []
        self.priced: list[_Priced] = []

    def seal(self) -> None:
        """Work out the cheapest of every suffix, and of every suffix within one number of tokens."""
        self.cheapest_from = list(self.priced)
        self.cheapest_exact_from = list(self.priced)
        for i in range(len(self.priced) - 2, -1, -1):
            self.cheapest_from[i] = min(self.priced[i], self.cheapest_from[i + 1])
            if self.tokens[i] == self.tokens[i + 1]:
                self.cheapest_exact_from[i] = min(self.priced[i], self.cheapest_exact_from[i + 1])

    def cheapest(self, need: Need) -> _Priced | None:
        at = max(bisect_left(self.tokens, need.tokens), bisect_left(self.reqs, need.reqs))
        if at == len(self.tokens):
            return None
        if not need.exact:
            return self.cheapest_from[at]
        return self.cheapest_exact_from[at] if self.tokens[at] == need.tokens else None


class _Bucket:
    """Graphs of one mode that differ in tokens and requests only."""

    def __init__(self, lora: int, context: int | None, encoder: bool, priced: list[_Priced]) -> None:
        self.lora = lora
        self.context = math.inf if context is None else context
        self.encoder = encoder
        self.chains = _chains(priced)

    def serves(self, need: Need) -> bool:
        return (
            self.lora >= need.lora
            and self.context >= need.context
            and (need.encoder is None or self.encoder == need.encoder)
        )


def _chains(priced: list[_Priced]) -> list[_Chain]:
    """As few chains as possible: one for any ladder, more only where more tokens come with fewer requests."""
    chains: list[_Chain] = []
    for entry in sorted(priced, key=lambda entry: (entry[1].num_tokens, entry[1].num_reqs)):
        descriptor = entry[1]
        # Chains stay sorted by falling last requests, so the first that fits is the tightest.
        for chain in chains:
            if chain.reqs[-1] <= descriptor.num_reqs:
                break
        else:
            chain = _Chain()
            chains.append(chain)
        chain.tokens.append(descriptor.num_tokens)
        chain.reqs.append(descriptor.num_reqs)
        chain.priced.append(entry)
    for chain in chains:
        chain.seal()
    return chains


class Index:
    """Graphs arranged so that the cheapest one for a batch is found without a look at all of them."""

    def __init__(self, keys: Iterable[GraphKey], cost: Cost | None) -> None:
        alike: defaultdict[tuple[Any, ...], list[_Priced]] = defaultdict(list)
        for mode, descriptor in keys:
            price = _price(cost, mode, descriptor)
            alike[mode, descriptor.query_len, descriptor.lora, descriptor.context, descriptor.encoder].append(
                (price, descriptor)
            )
        self._families: defaultdict[tuple[GraphMode, int | None], list[_Bucket]] = defaultdict(list)
        for (mode, query_len, lora, context, encoder), priced in alike.items():
            self._families[mode, query_len].append(_Bucket(lora, context, encoder, priced))

    def cheapest(self, mode: GraphMode, need: Need, *, any_length: bool = False) -> BatchDescriptor | None:
        """The cheapest graph that serves a batch; with `any_length`, as if query lengths did not matter."""
        if mode is GraphMode.FULL and need.cascade:
            return None
        if any_length:
            families = [family for family in self._families if family[0] is mode]
        else:
            # A piecewise graph and a full one for mixed lengths serve uniform batches as well.
            families = [(mode, query_len) for query_len in {need.query_len, None}]
        candidates = [
            candidate
            for family in families
            for bucket in self._families.get(family, ())
            if bucket.serves(need)
            for chain in bucket.chains
            if (candidate := chain.cheapest(need)) is not None
        ]
        return min(candidates)[1] if candidates else None


def _price(cost: Cost | None, mode: GraphMode, descriptor: BatchDescriptor) -> tuple[Any, ...]:
    # The sort key tells any two descriptors apart, so prices never tie.
    if cost is None:
        return descriptor.sort_key
    price = cost(mode, descriptor)
    if math.isnan(price):
        raise ConfigError(f"the cost of the {mode} graph for {descriptor} is not a number")
    return (price, *descriptor.sort_key)
