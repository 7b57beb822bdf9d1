"""Which graphs fit into a memory budget, and how much padding each graph saves.

Graphs of a pool share working memory, so a set of them takes as much as the largest plus what each keeps for
itself. If that is too much, the graphs whose bytes save the least padding are dropped.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..dispatching.keys import GraphKey

_EAGER = 2
"""A step without a graph counts as padded to this many times the largest size of its kind."""


@dataclass(frozen=True)
class Weight:
    """Bytes that one graph takes, measured by recording it in separate memory."""

    shared: int
    """Intermediates: other graphs may work in the same memory."""
    bridges: int = 0
    """Bridges between segments: other graphs of the same runner use them as well."""
    own: int = 0
    """What no other graph may use: results that outlive other replays."""

    @property
    def total(self) -> int:
        """If it were the only graph."""
        return self.shared + self.bridges + self.own


def affordable(
    weights: Mapping[GraphKey, Weight], budget: int, held: int = 0, asked: Collection[GraphKey] = ()
) -> list[GraphKey]:
    """The graphs to capture, those first that need the most shared memory, so that the others find room.

    `held`: shared memory that there is already. `asked`: all graphs of the ladder, if these are not all.
    """
    kept = sorted(weights, key=lambda key: -weights[key].shared)
    kept = [key for key in kept if weights[key].total <= budget]
    while kept and _taken(kept, weights, held) > budget:
        saves = padding_saved(kept, asked or weights)
        prices = {key: saves[key] / less for key in kept if (less := _freed(key, kept, weights, held))}
        kept.remove(min(prices, key=prices.__getitem__) if prices else kept[0])
    return kept


def predicted_growth(
    keys: Iterable[GraphKey], weights: Mapping[GraphKey, Weight], held: int = 0
) -> dict[GraphKey, int]:
    """By how much each graph will make the pool grow, captured in this order."""
    grown: dict[GraphKey, int] = {}
    captured: list[GraphKey] = []
    for key in keys:
        before = _taken(captured, weights, held)
        captured.append(key)
        grown[key] = _taken(captured, weights, held) - before
    return grown


def padding_saved(keys: Collection[GraphKey], asked: Collection[GraphKey] = ()) -> dict[GraphKey, float]:
    """Average tokens of padding that each graph saves per step, given the others.

    Assumes that all sizes up to the largest of a kind are equally frequent. Without the largest graph a step
    of its size would run eagerly, which counts as padding to twice that size. `asked`: further keys, if the
    largest is not in `keys`.
    """
    limits: dict[Hashable, int] = {}
    for key in (*keys, *asked):
        limits[_kind(key)] = max(limits.get(_kind(key), 0), key.descriptor.num_tokens)
    saved: dict[GraphKey, float] = {}
    for kind, limit in limits.items():
        of_kind = sorted((key for key in keys if _kind(key) == kind), key=lambda key: key.descriptor)
        sizes = [0, *(key.descriptor.num_tokens for key in of_kind), _EAGER * limit]
        for key, below, size, above in zip(of_kind, sizes, sizes[1:], sizes[2:], strict=False):
            saved[key] = (size - below) / limit * (above - size)
    return saved


def _taken(keys: Iterable[GraphKey], weights: Mapping[GraphKey, Weight], held: int) -> int:
    kept = [weights[key] for key in keys]
    shared, bridges = max([held, *(each.shared for each in kept)]), max([0, *(each.bridges for each in kept)])
    return shared + bridges + sum(each.own for each in kept)


def _freed(key: GraphKey, among: Sequence[GraphKey], weights: Mapping[GraphKey, Weight], held: int) -> int:
    without = [each for each in among if each != key]
    return _taken(among, weights, held) - _taken(without, weights, held)


def _kind(key: GraphKey) -> Hashable:
    """What graphs of one ladder have in common."""
    of = key.descriptor
    return key.mode, of.query_len, of.lora, of.cascade, of.context, of.extra, of.is_alone
