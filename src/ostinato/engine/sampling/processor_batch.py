"""The objects behind `LLM(logits_processors=[...])` and the batch as they see it (`processor_protocol`).

A class that only makes functions for single requests is turned into such functions, as if each request had
them in its parameters. With any other class, every request waits for its last token before the next is
drawn, as with any function of a caller (Note [Grammars] in core.py).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.graphs import ConfigError

from ..parameters.sampling_params import RequestError, SamplingParams
from ..scheduling.request import Request
from .processor_protocol import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, MoveDirectionality


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
