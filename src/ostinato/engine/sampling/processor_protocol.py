"""Callers' classes that change the logits of whole batches: `LLM(logits_processors=[...])`.

The protocol is vLLM's. An engine makes one object of each class. Before every step it passes the changes of
the batch (`update_state`), then the logits of the batch (`apply`). A request keeps its index until it is
removed or moved. `AdapterLogitsProcessor` is for code that handles one request at a time; it costs something
only for the requests that it has a function for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..parameters.sampling_params import SamplingParams
from .logits_processors import takes_prompt

State = TypeVar("State")

RequestLogitsProcessor = Callable[..., Tensor]
"""A function of (token ids so far, logits) or (prompt ids, token ids so far, logits)."""


class MoveDirectionality(Enum):
    """How a request moves within a batch."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """How a batch has changed: first requests were removed, then others added, then some moved."""

    batch_size: int
    removed: Sequence[int]
    """Indices that are now empty."""
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    """(index, parameters, prompt ids, output ids); the last list grows with the request."""
    moved: Sequence[tuple[int, int, MoveDirectionality]]
    """(from, to, how)."""


class LogitsProcessor(ABC):
    """Changes the logits of a batch."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for unsupported parameters; the request is then refused."""
        return

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """The changed logits [batch, vocab]; may be changed in place."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the most likely token never changes. Then it gets logits divided by the temperature, and
        greedy requests skip it."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before every `apply`; None if the same requests are in the same places."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Makes a function for each request that needs one."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, partial[Tensor]] = {}
        """By index: the request's function, bound to its token lists."""

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function of a request with these parameters, or None if it needs none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Keep the functions of the requests in the batch."""
        process_dict_updates(self.req_info, batch_update, self._bound)

    def _bound(
        self, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> partial[Tensor] | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        return partial(function, *((prompt, output) if takes_prompt(function) else (output,)))

    def apply(self, logits: Tensor) -> Tensor:
        """Apply each function to its own line."""
        for index, function in self.req_info.items():
            logits[index] = function(logits[index])
        return logits


def process_dict_updates(
    req_entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], State | None],
) -> bool:
    """Keep a dictionary by index of what `new_state` returns for requests; True if it has changed."""
    if batch_update is None:
        return False
    before = dict(req_entries)
    for index in batch_update.removed:
        req_entries.pop(index, None)
    for index, params, prompt, output in batch_update.added:
        req_entries.pop(index, None)
        if (state := new_state(params, prompt, output)) is not None:
            req_entries[index] = state
    for first, second, how in batch_update.moved:
        moving, replaced = req_entries.pop(first, None), req_entries.pop(second, None)
        if moving is not None:
            req_entries[second] = moving
        if replaced is not None and how is MoveDirectionality.SWAP:
            req_entries[first] = replaced
    return req_entries != before
