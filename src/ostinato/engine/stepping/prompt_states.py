"""Hidden states of prompts to embed: summed up on the device, one result per prompt comes to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from ..scheduling.request import Request


class PromptStates:
    """The states of a whole prompt, summarised; on their way to the host until read."""

    def __init__(self, both: Tensor, num_tokens: int) -> None:
        """`both` [2, H], float32: the sum of all states, and the last one."""
        self._num_tokens = num_tokens
        self._done = torch.cuda.Event() if both.is_cuda else None
        self._both = torch.empty(both.shape, dtype=both.dtype, pin_memory=both.is_cuda)
        self._both.copy_(both, non_blocking=True)
        if self._done is not None:
            self._done.record()

    @property
    def mean(self) -> Tensor:
        """Of all states [H]; waits for the device."""
        return self._read()[0] / self._num_tokens

    @property
    def last(self) -> Tensor:
        """The last token's state [H]; waits for the device."""
        return self._read()[1]

    def _read(self) -> Tensor:
        if self._done is not None:
            self._done.synchronize()
        return self._both


class PromptSums:
    """The sum of the states of each running prompt so far, by row."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._sums: Tensor | None = None

    def add(self, request: Request, states: Tensor, start: int) -> PromptStates | None:
        """Add the states [t, H] of the request's tokens from `start` on; returns the result with the last of
        them.

        Call it after the step that computes them. A preempted request starts again at its first token, as
        does the next request in its row.
        """
        if self._sums is None:  # most engines never embed anything
            size = self._num_rows, states.size(1)
            self._sums = torch.zeros(size, dtype=torch.float32, device=states.device)
        total, new = self._sums[request.row], states.sum(0, dtype=torch.float32)
        if start:
            total += new
        else:
            total.copy_(new)
        if start + len(states) < request.num_prompt_tokens:
            return None
        return PromptStates(torch.stack([total, states[-1].float()]), request.num_prompt_tokens)
