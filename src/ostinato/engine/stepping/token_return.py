"""Sampled tokens, on their way to the host and on it.

On a GPU the last kernel of a step writes the tokens into pinned memory itself, with log-probabilities if
requested: no copy is queued after the graph, and the host only waits for an event.

Requests with at most a temperature and a seed get their tokens at the end of a decode graph
(`PlainSampling`), so most steps are one graph. Requests that need more are skipped there; a sampling graph
after the decode graph serves only them, and writes their tokens into the same line.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.graphs import CurrentStream
from ostinato.kernels.sampling.plain import PlainSettings, return_plain
from ostinato.kernels.sampling.token_lines import LINE_HEAD, LogprobLines, TokenLines

from ..scheduling.request import IntArray
from ..speculating.target import Bunch
from .device_rows import DeviceRows


@dataclass(frozen=True)
class Sampled:
    """The tokens of a step, on the host; valid until the ring of lines has come round."""

    tokens: IntArray
    """int64 [R]."""
    logprobs: IntArray | None = None
    """float32 [R, 1 + n]: of the sampled token, then of the n most likely; None if no request wants them.
    Requests without logprobs have zeros, those with fewer than n have arbitrary values after their own."""
    logprob_tokens: IntArray | None = None
    """int64 [R, 1 + n]: their tokens."""
    ranks: IntArray | None = None
    """int64 [R]: ranks of the sampled tokens; 1 is the most likely."""
    span: tuple[int, int] | None = None
    """When the last decode step began and this step ended, in nanoseconds of the device's clock, if there is
    one."""
    told: IntArray | None = None
    """int64: the places of requests with logprobs; None if there are none."""
    further: IntArray | None = None
    """int64 [k, R], if the step verified k drafts: the tokens after `tokens`..."""
    num_new: IntArray | None = None
    """...and int64 [R]: the number of new tokens, including the one in `tokens`."""


class BesideLines(NamedTuple):
    """Log-probabilities that no graph writes, on the host when the step is done."""

    places: IntArray
    """int64 [n]: the places of their requests."""
    values: Tensor
    """float32 [n, 1 + most]: of the sampled token, then of the most likely."""
    tokens: Tensor
    """int64 [n, 1 + most]."""
    ranks: Tensor
    """int64 [n]."""


class Amendment(NamedTuple):
    """What a sampling graph after plain sampling adds to a line."""

    told: IntArray
    """int64 [n]: places of the requests with logprobs, in the order in which these are returned."""
    logprobs: LogprobLines
    beside: BesideLines | None = None
    """For requests whose logprobs the graph does not return."""


class Launched:
    """A step whose tokens are on their way."""

    def __init__(
        self,
        line: IntArray,
        num_requests: int,
        count: int,
        amendment: Amendment | None,
        bunch: Bunch | None,
        done: torch.cuda.Event | None,
    ) -> None:
        """`done`: None if everything is done already."""
        self._line = line
        self._num_requests = num_requests
        self._count = count
        self._amendment = amendment
        self._bunch = bunch
        self._done = done
        self._others: tuple[Launched, IntArray] | None = None

    def amended_by(self, others: Launched, places: IntArray) -> None:
        """The tokens of the requests at `places` bool [R] are in another line of the same layout, written
        after this one."""
        self._others = others, places

    def read(self) -> Sampled:
        """The tokens on the host; waits for the device."""
        if self._others is None:
            return self._read()
        own, (others, places) = self._read(), self._others
        found = others._read()

        def merged(mine: IntArray | None, theirs: IntArray | None) -> IntArray:
            assert mine is not None
            assert theirs is not None
            return np.where(places, theirs, mine)

        return replace(
            own,
            tokens=merged(own.tokens, found.tokens),
            further=merged(own.further, found.further),
            num_new=merged(own.num_new, found.num_new),
            span=None if own.span is None or found.span is None else (own.span[0], found.span[1]),
        )

    def _read(self) -> Sampled:
        if self._done is not None:
            self._done.synchronize()
        tokens = self._line[LINE_HEAD : LINE_HEAD + self._num_requests]
        assert self._line[0] == self._count, "the tokens of another step"
        assert self._line[3] == (self._amendment is not None), "tokens of requests that ask for more"
        span = None if self._done is None else (int(self._line[1]), int(self._line[2]))
        num_new, further = self._read_bunch()
        if self._amendment is None or not (len(self._amendment.told) or self._amendment.beside):
            return Sampled(tokens, span=span, further=further, num_new=num_new)
        told, logprobs, beside = self._amendment
        values, named, ranks = (self._placed(lines, told) for lines in logprobs)
        if beside is not None:
            width = beside.values.size(1)
            values[beside.places, :width] = beside.values.numpy()
            named[beside.places, :width] = beside.tokens.numpy()
            ranks[beside.places] = beside.ranks.numpy()
            told = np.concatenate([told, beside.places])
        return Sampled(tokens, values, named, ranks, span, told, further, num_new)

    def _read_bunch(self) -> tuple[IntArray | None, IntArray | None]:
        if self._bunch is None:
            return None, None
        count, length = self._bunch
        parts = self._line[LINE_HEAD : LINE_HEAD + count * (length + 1)].reshape(length + 1, count)
        return parts[1, : self._num_requests], parts[2:, : self._num_requests]

    def _placed(self, lines: Tensor, told: IntArray) -> IntArray:
        """Results that came back one after another, each moved to its request's place in the step."""
        compact = lines[self._count % lines.size(0), : len(told)].numpy()
        placed = np.zeros((self._num_requests, *compact.shape[1:]), compact.dtype)
        placed[told] = compact
        return placed


class TokenReturn:
    """Where steps leave their tokens, and which line of the ring belongs to which step.

    A step has one line. Its decode graph writes it, or plain sampling after it; a sampling graph for the
    requests that need more then amends it. Device and host count the lines independently:
    `Launched.read` checks that they agree, and that the line was amended if it should have been.
    """

    def __init__(self, last_tokens: Tensor, began: Tensor, max_tokens: int, num_lines: int) -> None:
        """Lines with places for `max_tokens`. `num_lines`: more than the lines of all steps whose tokens may
        be unread at one time."""
        self.lines = TokenLines.of(last_tokens, began, max_tokens, num_lines)
        self._ring = self.lines.ring.numpy()
        self._num_launched = 0
        self._is_in_doubt = False
        self._events = [torch.cuda.Event() if last_tokens.is_cuda else None for _ in range(num_lines)]
        self._stream = CurrentStream(last_tokens.device)

    @property
    def state(self) -> dict[str, Tensor]:
        """What steps change and trial runs must not."""
        return {"counts of lines": self.lines.counts}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Lines written inside are undone at the end; the host must not count them."""
        kept = [(tensor, tensor.clone()) for tensor in (self.lines.counts, self.lines.ring, self.lines.began)]
        try:
            yield
        finally:
            if self.lines.counts.is_cuda:
                torch.cuda.synchronize(self.lines.counts.device)
            for tensor, before in kept:
                tensor.copy_(before)

    def launched(self) -> None:
        """Note the launch of something that writes a line."""
        self._num_launched += 1

    def doubt(self) -> None:
        """A step failed: it is unknown whether what writes its line was launched."""
        self._is_in_doubt = True

    def settle(self) -> None:
        """After `doubt`, before the next step: give the device the host's count.

        This waits for the device, so nothing that a failed step has queued still reads pinned memory.
        """
        if self._is_in_doubt:
            self.lines.counts.copy_(torch.tensor([self._num_launched, 0]))
            self._is_in_doubt = False

    def newest(
        self, num_requests: int, amendment: Amendment | None = None, bunch: Bunch | None = None
    ) -> Launched:
        """The line launched last, to be read. `amendment`: what was launched after it. `bunch`: the layout,
        if the step verified drafts."""
        count = self._num_launched - 1
        place = count % len(self._ring)
        done = self._events[place]
        if done is not None:
            done.record(self._stream.get())
        return Launched(self._ring[place], num_requests, count, amendment, bunch, done)


class PlainSampling:
    """Called by a graph once the logits are there."""

    def __init__(self, rows: DeviceRows, logits: Tensor, returned: TokenReturn) -> None:
        self._logits = logits
        self._settings = PlainSettings(rows["is_plain"], rows["temperature"], rows["seeds"], rows["lengths"])
        self._lines = returned.lines

    def __call__(self, req_rows: Tensor) -> None:
        """Captured: choose, and leave the tokens in their rows and in the next line."""
        return_plain(self._logits[: req_rows.size(0)], req_rows, self._settings, self._lines)
