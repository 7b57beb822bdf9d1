"""Sampled tokens on their way to the host, and there.

On a GPU the last kernel of a sampling graph writes the tokens into pinned memory itself: no copy is queued
behind the graph, and the host only waits for an event. Log-probabilities, rarely asked for, are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.graphs import CurrentStream
from ostinato.kernels import request_rows
from ostinato.kernels.request_rows import LINE_HEAD

from .request import IntArray


@dataclass(frozen=True)
class Sampled:
    """The tokens of a step, on the host; good until as many steps later as the ring has lines."""

    tokens: IntArray
    """int64 [R]."""
    logprobs: IntArray | None = None
    """float32 [R, 1 + n]: of the sampled token, then of the n likeliest; None if nobody asked."""
    logprob_tokens: IntArray | None = None
    """int64 [R, 1 + n]: whose they are."""
    ranks: IntArray | None = None
    """int64 [R]: of the sampled tokens; 1 is the likeliest."""
    span: tuple[int, int] | None = None
    """When the last decode step began and this step ended, in nanoseconds of the device's clock, if it has
    one."""


class Launched:
    """A sampling step whose results are on their way."""

    def __init__(
        self, line: IntArray, count: int | None, extra: Sequence[Tensor], done: torch.cuda.Event | None
    ) -> None:
        self._line = line
        self._count = count
        self._extra = extra
        self._done = done

    def read(self) -> Sampled:
        """The tokens on the host; waits for the device."""
        if self._done is not None:
            self._done.synchronize()
        tokens = self._line[LINE_HEAD:]
        assert self._count is None or self._line[0] == self._count, "the tokens of another step"
        span = None if self._count is None else (int(self._line[1]), int(self._line[2]))
        if not self._extra:
            return Sampled(tokens, span=span)
        chosen, ranks, top, top_tokens = self._extra
        logprobs = torch.cat([chosen[:, None], top], 1).numpy()
        logprob_tokens = torch.cat([torch.from_numpy(tokens)[:, None], top_tokens], 1).numpy()
        return Sampled(tokens, logprobs, logprob_tokens, ranks.numpy(), span)


class TokenReturn:
    """Where sampling graphs leave their tokens for the next step and for the host."""

    def __init__(self, last_tokens: Tensor, began: Tensor, max_rows: int, num_lines: int) -> None:
        """`num_lines`: more than there are steps whose tokens are unread at any time."""
        self._last_tokens = last_tokens
        self._began = began
        self._on_gpu = last_tokens.is_cuda
        self._ring = torch.zeros(num_lines, LINE_HEAD + max_rows, dtype=torch.int64, pin_memory=self._on_gpu)
        self._lines = self._ring.numpy()
        self.count = torch.zeros(1, dtype=torch.int64, device=last_tokens.device)
        """Steps sampled, on the device; trial runs must not change it."""
        self._sent = 0
        self._events = [torch.cuda.Event() for _ in range(num_lines)] if self._on_gpu else []
        self._stream = CurrentStream(last_tokens.device)

    def keep(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Captured: leave the tokens in their rows and, on a GPU, in the ring."""
        if self._on_gpu:
            request_rows.return_tokens(rows, self._last_tokens, tokens, self._ring, self.count, self._began)
        else:
            request_rows.keep_tokens(rows, self._last_tokens, tokens)
        return tokens

    def sent(self, outputs: Sequence[Tensor]) -> Launched:
        """A sampling step was launched: its tokens, and what else its graph returned, are to be read."""
        tokens, *extra = outputs
        if not self._on_gpu:
            line = self._lines[0, : LINE_HEAD + len(tokens)]
            line[LINE_HEAD:] = tokens.numpy()
            return Launched(line.copy(), None, [output.clone() for output in extra], None)
        count = self._sent
        self._sent += 1
        place = count % len(self._lines)
        copies = [
            torch.empty(output.shape, dtype=output.dtype, pin_memory=True).copy_(output, non_blocking=True)
            for output in extra
        ]
        self._events[place].record(self._stream.get())
        line = self._lines[place, : LINE_HEAD + tokens.size(0)]
        return Launched(line, count, copies, self._events[place])
