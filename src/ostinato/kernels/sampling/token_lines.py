"""Lines of host memory in which tokens, and what is asked beside them, come back from the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LINE_HEAD = 4
"""What a line begins with: its count, when the step's decode began, when it ended, whether it was amended."""


class TokenLines(NamedTuple):
    """Where sampled tokens go: into their rows, and into lines of host memory, which the steps use in turn.

    A line begins with how many were written before it and, on a GPU, with two times: that of `began`, and
    that of its own writing. Where requests ask for more than plain sampling, their tokens are written over
    what plain sampling left there: such a line is amended, and its end is then.
    """

    last_tokens: Tensor
    """int64 [max_rows]: the token of each row, where its next step finds it."""
    ring: Tensor
    """int64 [lines, LINE_HEAD + max requests] on the host, pinned where there is a GPU."""
    counts: Tensor
    """int64 [2] on the device: lines written so far, and what their kernel counts with, 0 between steps."""
    began: Tensor
    """int64 [1]: when the last decode step began, in nanoseconds of the device's own clock."""

    @classmethod
    def of(cls, last_tokens: Tensor, began: Tensor, max_requests: int, num_lines: int) -> TokenLines:
        """Empty ones, for tokens of at most so many requests each."""
        device = last_tokens.device
        is_pinned = device.type == "cuda"
        ring = torch.zeros(num_lines, LINE_HEAD + max_requests, dtype=torch.int64, pin_memory=is_pinned)
        return cls(last_tokens, ring, torch.zeros(2, dtype=torch.int64, device=device), began)


class LogprobLines(NamedTuple):
    """Log-probabilities on the host, beside the lines of tokens; of the requests that ask, one after another.

    Under the model itself: before bias, penalties, temperature and filters.
    """

    values: Tensor
    """float32 [lines, max requests, 1 + n]: of the chosen token, then of the n likeliest."""
    tokens: Tensor
    """int64 [lines, max requests, 1 + n]: whose they are."""
    ranks: Tensor
    """int64 [lines, max requests]: 1 plus the number of tokens more likely than the chosen one."""

    @classmethod
    def of(cls, lines: TokenLines, num_top: int) -> LogprobLines:
        """Empty ones, as many as there are of tokens, pinned as those are."""
        num_lines, length = lines.ring.shape
        shape = (num_lines, length - LINE_HEAD, 1 + num_top)
        pinned = lines.ring.is_pinned() if lines.counts.is_cuda else False
        return cls(
            torch.zeros(shape, dtype=torch.float32, pin_memory=pinned),
            torch.zeros(shape, dtype=torch.int64, pin_memory=pinned),
            torch.zeros(shape[:2], dtype=torch.int64, pin_memory=pinned),
        )
