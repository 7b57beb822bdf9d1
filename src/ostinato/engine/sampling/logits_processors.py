"""Callers' functions that change the logits of a request before a token is drawn from them.

They run on the host between the forward pass and sampling, only for the requests that have them.

Callers' classes that change the logits of whole batches (`LLM(logits_processors=[...])`) follow vLLM's
protocol. An engine makes one object of each class. Before every step it passes the changes of the batch
(`update_state`), then the logits of the batch (`apply`). A request keeps its index until it is removed or
moved. `AdapterLogitsProcessor` is for code that handles one request at a time; it costs something only for
the requests that it has a function for. A class that only makes functions for single requests is turned into
such functions, as if each request had them in its parameters. With any other class, every request waits for
its last token before the next is drawn, as with any function of a caller (Note [Grammars] in core.py).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ostinato.graphs import ConfigError

from ..parameters.sampling_params import RequestError, SamplingParams
from ..scheduling.request import Request
from ..scheduling.token_rules import NOTHING_LEFT


def takes_prompt(function: Callable[..., Any]) -> bool:
    """Whether it takes (prompt ids, token ids so far, logits) instead of the last two."""
    try:
        wanted = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions written in C have none
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([each for each in wanted if each.kind in kinds and each.default is each.empty]) == 3


@torch.no_grad()
def process(request: Request, logits: Tensor) -> str | None:
    """Apply a request's functions to float32 logits [vocab], in place; returns an error message, or None."""
    output, prompt = request.output_ids, request.prompt_ids.tolist()
    changed = logits
    for function in request.processors:
        name = getattr(function, "__name__", type(function).__name__)
        given = (prompt, output, changed) if takes_prompt(function) else (output, changed)
        try:
            changed = function(*given)
        except Exception as error:  # whatever a caller's function raises is reported to the caller
            return f"logits_processors: {name} raised {type(error).__name__}: {error}"
        if not isinstance(changed, Tensor) or changed.shape != logits.shape:
            found = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            return f"logits_processors: {name} must return logits of shape {tuple(logits.shape)}, not {found}"
    if changed is not logits:
        logits.copy_(changed)
    return None


def what_is_wrong(logits: Tensor, allowed: Tensor) -> str | None:
    """Why no token can be drawn from changed logits [vocab]; `allowed`: bool [vocab], from the masks."""
    best = float(logits.masked_fill(~allowed, -math.inf).max())
    if math.isnan(best) or best == math.inf:
        return f"logits_processors: they returned {best} among the logits"
    return f"logits_processors: {NOTHING_LEFT}" if best == -math.inf else None


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


def processor_classes(given: Sequence[Any]) -> list[type[LogitsProcessor]]:
    """Classes from themselves or from their names, `module:Class`. Raises ConfigError for anything else."""
    return [_class_of(each) for each in given]


def _class_of(given: Any) -> type[LogitsProcessor]:
    found = given
    if isinstance(given, str):
        module, _, name = given.partition(":")
        if not module or not name:
            raise ConfigError(f"logits_processors: {given!r} must be written as module:Class")
        try:
            found = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"logits_processors: {given}: {error}") from error
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        raise ConfigError(
            f"logits_processors: {given!r} is not a class that inherits from LogitsProcessor "
            "(ostinato.v1.sample.logits_processor); functions go to SamplingParams"
        )
    return found


class ProcessorBatch:
    """All processors of an engine, and the indices under which they know requests."""

    def __init__(self, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = processors
        self._adapters = [
            each
            for each in processors
            if isinstance(each, AdapterLogitsProcessor) and _is_of_single_requests(type(each))
        ]
        self._of_batches = [each for each in processors if each not in self._adapters]
        self._slots: list[Request] = []
        self._outputs: list[list[int]] = []

    @property
    def sees_everybody(self) -> bool:
        """Whether a processor needs all requests."""
        return bool(self._of_batches)

    def check(self, params: SamplingParams) -> None:
        """Raises RequestError for parameters that a processor refuses."""
        for processor in self._processors:
            try:
                processor.validate_params(params)
            except ValueError as error:
                raise RequestError(f"{type(processor).__name__}: {error}") from error

    def functions(self, params: SamplingParams) -> list[Callable[..., Any]]:
        """The functions that processors of single requests make for this one."""
        made = []
        for adapter in self._adapters:
            try:
                function = adapter.new_req_logits_processor(params)
            except Exception as error:  # whatever a caller's class raises is reported to the caller
                raise RequestError(_raised(adapter, error)) from error
            if function is not None and adapter.is_argmax_invariant():
                heat = _heat(params)
                function = None if heat is None else _scaled(function, heat)
            if function is not None:
                made.append(function)
        return made

    @torch.no_grad()
    def apply(self, lines: Mapping[Request, Tensor]) -> str | None:
        """Change these lines of float32 logits [vocab], one for each request of a step. Returns an error
        message, and then no line has changed, or None."""
        update = self._update(list(lines))
        error = None
        for processor in self._of_batches:  # even after an error: each must know the batch
            try:
                processor.update_state(update)
            except Exception as raised:
                error = error or _raised(processor, raised)
        if error is not None:
            return error
        logits = torch.stack([lines[request] for request in self._slots])
        for processor in self._of_batches:
            try:
                changed = self._changed(processor, logits)
            except Exception as raised:
                return _raised(processor, raised)
            if not isinstance(changed, Tensor) or changed.shape != logits.shape:
                found = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
                wanted = tuple(logits.shape)
                return f"{type(processor).__name__} must return logits of shape {wanted}, not {found}"
            logits = changed
        for request, line in zip(self._slots, logits, strict=True):
            lines[request].copy_(line)
        return None

    def _changed(self, processor: LogitsProcessor, logits: Tensor) -> Tensor:
        if not processor.is_argmax_invariant():
            return processor.apply(logits)
        heats = [_heat(request.params) or 1.0 for request in self._slots]
        heat = torch.tensor(heats, dtype=logits.dtype, device=logits.device)[:, None]
        return processor.apply(logits / heat) * heat

    def _update(self, requests: Sequence[Request]) -> BatchUpdate | None:
        """Make the batch that of this step; returns the changes. A newcomer takes the place of a request that
        left; then the last requests move into the remaining gaps."""
        here, known = set(requests), set(self._slots)
        empty = [index for index, request in enumerate(self._slots) if request not in here]
        added = []
        for request in requests:
            if request not in known:
                index = empty.pop(0) if empty else len(self._slots)
                self._slots[index : index + 1], self._outputs[index : index + 1] = [request], [[]]
                assert request.params is not None
                added.append((index, request.params, request.prompt_ids.tolist(), self._outputs[index]))
        size = len(requests)
        holes = [index for index in empty if index < size]
        last = [index for index in range(size, len(self._slots)) if index not in empty]
        moved = [(old, new, MoveDirectionality.UNIDIRECTIONAL) for old, new in zip(last, holes, strict=True)]
        for old, new, _ in moved:
            self._slots[new], self._outputs[new] = self._slots[old], self._outputs[old]
        del self._slots[size:], self._outputs[size:]
        for request, output in zip(self._slots, self._outputs, strict=True):
            if missing := request.num_output_tokens - len(output):
                output += request.last_output(missing)
        return BatchUpdate(size, empty, added, moved) if added or empty else None


def _is_of_single_requests(kind: type[AdapterLogitsProcessor]) -> bool:
    """Whether the class only makes functions for single requests."""
    found = (kind.apply, kind.update_state)
    return found == (AdapterLogitsProcessor.apply, AdapterLogitsProcessor.update_state)


def _heat(params: SamplingParams | None) -> float | None:
    """The temperature; None: greedy."""
    return None if params is None or params.is_greedy else params.temperature


def _scaled(function: Callable[..., Any], heat: float) -> Callable[..., Any]:
    """The same function on logits divided by a temperature."""

    @functools.wraps(function, assigned=("__name__",), updated=())
    def called(*given: Any) -> Any:
        *tokens, logits = given
        found = function(*tokens, logits / heat)
        return found * heat if isinstance(found, Tensor) else found

    return called


def _raised(processor: LogitsProcessor, error: Exception) -> str:
    return f"{type(processor).__name__} raised {type(error).__name__}: {error}"
