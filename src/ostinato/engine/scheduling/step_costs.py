"""The cost of steps, learned from measured ones.

Note [Cost of a step]

    seconds = a + b * tokens + c * pairs + d * contexts

Weights are read once (a), every token goes through all products (b), a prompt's token attends to those before
it (c, pairs of a query and a key), and a decoding request reads all of its context (d). The four are fitted
to averages over steps of about the same size, so that a thousand steps of one size count no more than a few
of another; old averages fade. Until steps show otherwise, a pair costs what its arithmetic says and contexts
cost nothing.

A size beyond all measured ones is assumed to cost as much per token as the largest measured one: more than it
will, since weights are read once for all. So the allowed size grows step by step until its cost is known. For
a lower bound (`at_least`), the same goes below the smallest one, and longer contexts cost no more than the
longest that were measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .request import IntArray

MEMORY = 16.0
"""Steps that count in an average."""
HALF_LIFE = 512.0
"""Steps until an average counts half as much, if none of its size occurs..."""
LEAST_WEIGHT = 1 / 64
"""...and what it counts at the least: nothing else may be known of its size."""
MOST_AVERAGES = 128
EARLY, EVERY = 64, 8
"""After the first steps the four are fitted again after this many."""
_PRIOR_CONTEXT = 1024
"""The context of the step by which the arithmetic price of a pair is judged."""
_PRIOR_WEIGHT = 0.02
"""Of assumptions, relative to measurements."""


class StepSize(NamedTuple):
    """What the time of a step depends on."""

    tokens: int
    """As many as its graph has."""
    pairs: float
    """Of a prompt's query and a key that it attends to."""
    contexts: int
    """Of the decoding requests, summed up."""


@dataclass
class _Average:
    """An average over steps of about the same size."""

    seconds: float = 0.0
    size: tuple[float, ...] = (0.0, 0.0, 0.0)
    count: int = 0
    newest: int = 0

    def add(self, size: StepSize, seconds: float, at: int) -> None:
        if self.count and seconds < self.seconds / 2:
            self.count = 0  # earlier ones were delayed by something
        # One that was delayed itself counts as at most twice the average.
        seconds = min(seconds, 2 * self.seconds) if self.count else seconds
        self.count += 1
        weight = min(self.count, MEMORY)
        self.seconds += (seconds - self.seconds) / weight
        self.size = tuple(
            [known + (new - known) / weight for known, new in zip(self.size, size, strict=True)]
        )
        self.newest = at


class StepCosts:
    """Seconds of steps by their size; see Note [Cost of a step]."""

    def __init__(self, tokens_per_pair: float) -> None:
        """`tokens_per_pair`: the arithmetic cost of a pair, in tokens."""
        self._tokens_per_pair = tokens_per_pair
        self._averages: dict[tuple[int, int, int], _Average] = {}
        self._num_noted = 0
        self._smallest, self._largest, self._longest = 0, 0, 0
        self._fitted: tuple[float, ...] | None = None

    @property
    def is_known(self) -> bool:
        """Whether any step was measured."""
        return self._num_noted > 0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per step, per token, per pair and per token of context."""
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    def note(self, size: StepSize, seconds: float) -> None:
        """Record the duration of a step."""
        self._num_noted += 1
        self._averages.setdefault(_kind(size), _Average()).add(size, seconds, self._num_noted)
        if len(self._averages) > MOST_AVERAGES:
            del self._averages[min(self._averages, key=lambda kind: self._averages[kind].newest)]
        self._smallest = min(self._smallest or size.tokens, size.tokens)
        self._largest = max(self._largest, size.tokens)
        self._longest = max(self._longest, size.contexts)
        if self._num_noted < EARLY or self._num_noted % EVERY == 0:
            self._fitted = None

    def seconds(self, tokens: IntArray, pairs: IntArray, contexts: int) -> IntArray:
        """What steps of these sizes will take; some step must have been measured."""
        each_step, each_token, each_pair, each_context = self.coefficients
        most = self._largest
        known = each_step + each_token * np.minimum(tokens, most)
        found: IntArray = known * np.maximum(1.0, tokens / most) + each_pair * pairs + each_context * contexts
        return found

    def at_least(self, tokens: int, contexts: int) -> float:
        """What a decode step certainly takes, if this is known; else less."""
        if not self.is_known:
            return 0.0
        each_step, each_token, _, each_context = self.coefficients
        least = max(tokens, self._smallest)
        return (each_step + each_token * least) * tokens / least + each_context * min(contexts, self._longest)

    def _fit(self) -> tuple[float, ...]:
        averages = list(self._averages.values())
        seconds = np.array([each.seconds for each in averages])
        sizes = np.array([[1.0, *each.size] for each in averages])
        ages = self._num_noted - np.array([each.newest for each in averages])
        counts = np.minimum([each.count for each in averages], MEMORY)
        # Relative errors count: a short step's as much as a long one's.
        weights = np.sqrt(counts * np.maximum(0.5 ** (ages / HALF_LIFE), LEAST_WEIGHT))
        rows = sizes * (weights / seconds)[:, None]
        largest = int(sizes[:, 1].argmax())
        pairs = _PRIOR_WEIGHT * sizes[largest, 1] * _PRIOR_CONTEXT / seconds[largest]
        contexts = _PRIOR_WEIGHT * (sizes[:, 3] / seconds).max()
        prior = [[0.0, -self._tokens_per_pair * pairs, pairs, 0.0], [0.0, 0.0, 0.0, contexts]]
        return _not_negative(np.vstack([rows, prior]), np.append(weights, [0.0, 0.0]))


def _kind(size: StepSize) -> tuple[int, int, int]:
    """Equal for about the same size: the same rung, or decodes within factor two; contexts within four."""
    tokens = size.tokens if size.pairs else -size.tokens.bit_length()
    return tokens, int(size.pairs / size.tokens).bit_length(), size.contexts.bit_length() // 2


def _not_negative(rows: IntArray, wanted: IntArray) -> tuple[float, ...]:
    """The best coefficients without any below 0; if several fit, the smallest."""
    scale = np.abs(rows).max(0)
    scale[scale == 0] = 1.0
    scaled = rows / scale
    squares, products = scaled.T @ scaled, scaled.T @ wanted
    found = np.zeros(rows.shape[1])
    left = np.arange(rows.shape[1])
    while len(left):
        values = np.linalg.lstsq(squares[np.ix_(left, left)], products[left], rcond=1e-12)[0]
        if (values >= 0).all():
            found[left] = values / scale[left]
            break
        left = left[values > values.min()]
    return tuple(found.tolist())
