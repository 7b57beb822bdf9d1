"""A trainer's calls of an engine in Python: weights from its processes, and calls of the worker."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ostinato.models.weight_update import NamedTensors

from ..outputs import RequestOutput
from ..parameters.sampling_params import RequestError
from ..sleeping.served_weights import WeightsReport
from ..text_engine import TextEngine
from ..weight_sync.patience import Patience
from ..weight_sync.trainer_link import TrainerLink, done_here
from .worker import Worker, WorkerModel, make_worker

_Found = TypeVar("_Found")


class UpdateRequest(Protocol):
    """vLLM's `WeightTransferUpdateRequest`."""

    update_info: dict[str, Any]


PartOfUpdate = UpdateRequest | Mapping[str, Mapping[str, Any]]
"""The argument of vLLM's `update_weights`."""


class TrainerServices:
    """For an engine in this process."""

    _extension: type | None = None
    """Adds methods to its worker."""

    @property
    def engine(self) -> TextEngine:
        """The underlying engine."""
        raise NotImplementedError

    tell_outputs: Callable[[list[RequestOutput]], None] = staticmethod(lambda outputs: None)
    """Gets the outputs of steps that end before new weights; callers of `generate` see them anyway."""

    @functools.cached_property
    def trainer_link(self) -> TrainerLink:
        """What a trainer's process may do to the weights."""
        core = self.engine.core
        return TrainerLink(core.loaded.model, self._apply, core.config.config.weight_transfer_timeout)

    @functools.cached_property
    def worker(self) -> Worker:
        """The worker, for `collective_rpc`."""
        return make_worker(self._extension, self.engine, self.trainer_link, self._apply)

    def _apply(self, new: NamedTensors | str | Path, version: str | None) -> WeightsReport:
        return self.engine.update_weights(new, version, self.tell_outputs)

    def init_weight_transfer_engine(self, request: object) -> None:
        """Meet a trainer: {"init_info": {...}}, as with vLLM."""
        done_here(self.trainer_link.init_transfer(inside(request, "init_info")))

    def start_weight_update(self) -> None:
        """Begin an update in parts, and drop what is left of an unfinished one."""
        self.trainer_link.start()

    def finish_weight_update(self, weight_version: str | None = None) -> WeightsReport | None:
        """Write everything that has arrived since `start_weight_update`, or nothing."""
        return self.trainer_link.finish(weight_version)

    def update_weight_version(self, new_version: str) -> None:
        """Set the version of the weights."""
        with self.engine.turn:
            self.engine.core.weights.rename(new_version)

    def get_weight_version(self) -> str:
        """The same as `weight_version`."""
        return self.engine.core.weights.version

    def collective_rpc(
        self,
        method: str | Callable[..., _Found],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[_Found]:
        """Call a method of the worker, or a function with the worker, between two steps; returns its result
        in a list. Raises TimeoutError after `timeout` seconds: the call continues, and the engine waits for
        it."""
        call = worker_call(self.worker, method, args, kwargs or {})
        if timeout is None:
            return [self.between_steps(call)]
        what = f"collective_rpc({getattr(method, '__name__', method)!r})"
        return [Patience(timeout).within(what, lambda: self.between_steps(call))]

    def apply_model(self, func: Callable[[WorkerModel], _Found]) -> list[_Found]:
        """Call a function with the model, between two steps."""
        return [self.between_steps(lambda: func(self.worker.get_model()))]

    def between_steps(self, function: Callable[[], _Found]) -> _Found:
        """Call a function that may write weights."""
        engine = self.engine
        with engine.turn:
            engine.settle(self.tell_outputs)
            try:
                return function()
            finally:
                if self.worker.get_model().is_lent:
                    engine.core.scheduler.flush_prefix_cache()


def worker_call(
    worker: Worker, method: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[], Any]:
    """The call that `collective_rpc` makes. Raises RequestError if the worker cannot be called like this."""
    function = functools.partial(method, worker) if callable(method) else _method(worker, method)
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise RequestError(f"collective_rpc({method!r}): {error}") from None
    except ValueError:
        pass  # its signature is not known
    return functools.partial(function, *args, **kwargs)


def _method(worker: Worker, method: object) -> Callable[..., Any]:
    found = getattr(worker, method, None) if isinstance(method, str) and method[:1] != "_" else None
    if not callable(found):
        known = [name for name in dir(worker) if name[:1] != "_" and callable(getattr(worker, name))]
        raise RequestError(f"the worker has no method {method!r}: use one of {', '.join(known)}")
    function: Callable[..., Any] = found
    return function


def inside(request: object, name: str) -> Any:
    """The named field of one of vLLM's request objects, or of a dictionary."""
    if isinstance(request, Mapping):
        if request.keys() == {name}:
            return request[name]
    elif hasattr(request, name):
        return getattr(request, name)
    raise RequestError(f"{name} is missing: give {{{name!r}: {{...}}}}")


def is_part_of_update(weights: object) -> bool:
    """Whether `update_weights` was given part of an update of vLLM's, not weights."""
    if isinstance(weights, Mapping):
        return weights.keys() == {"update_info"}
    return hasattr(weights, "update_info")
