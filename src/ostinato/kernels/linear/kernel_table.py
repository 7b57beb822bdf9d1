"""Tables of measured choices: which kernel, with which tile, runs a matrix at how many tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from .tiles import MatrixShape, Tile


@dataclass(frozen=True)
class Choice:
    """What runs a matrix at `first` to `last` tokens."""

    first: int
    last: int
    tile: Tile


@dataclass(frozen=True)
class KernelTable:
    """The choices for a kind of GPU; each matrix has ranges of tokens, apart and in ascending order."""

    gpu: str
    """As `str(Gpu)` says it."""
    choices: Mapping[MatrixShape, tuple[Choice, ...]]

    def find(self, shape: MatrixShape, num_tokens: int) -> Tile | None:
        """The tile of the range that `num_tokens` is in; None if there is no such range."""
        for choice in self.choices.get(shape, ()):
            if choice.first <= num_tokens <= choice.last:
                return choice.tile
        return None

    def but(self, shape: MatrixShape, new: Choice) -> KernelTable:
        """The same, except for the tokens of one choice."""
        kept = [part for old in self.choices.get(shape, ()) for part in _outside(old, new)]
        ordered = sorted([*kept, new], key=lambda choice: choice.first)
        return KernelTable(self.gpu, {**self.choices, shape: tuple(_merged(ordered))})


def _outside(old: Choice, new: Choice) -> Iterator[Choice]:
    """What is left of `old` where `new` takes its tokens."""
    if old.first < new.first:
        yield Choice(old.first, min(old.last, new.first - 1), old.tile)
    if old.last > new.last:
        yield Choice(max(old.first, new.last + 1), old.last, old.tile)


def _merged(ordered: Iterable[Choice]) -> list[Choice]:
    """Neighbours with the same tile as one."""
    merged: list[Choice] = []
    for choice in ordered:
        if merged and merged[-1].tile == choice.tile and merged[-1].last + 1 == choice.first:
            choice = Choice(merged.pop().first, choice.last, choice.tile)
        merged.append(choice)
    return merged
