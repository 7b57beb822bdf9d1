"""What `graphed` returns: as good as the thing it wraps, to everyone who looks."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from ..checking.verify import Verification
from ..report import Report
from .graphed_call import GraphedCall


class _GraphControls:
    """The calls a wrapper adds to what it wraps."""

    graph_call: GraphedCall

    def unwrap(self) -> Any:
        """What was wrapped."""
        return self.graph_call.function

    def capture(self, *args: Any, **kwargs: Any) -> Report:
        """Capture every rung for calls like this one, ahead of the first call."""
        return self.graph_call.capture(*args, **kwargs)

    def recapture(self) -> Report:
        """Capture again, after weights have moved."""
        return self.graph_call.recapture()

    def report(self) -> Report:
        """What was captured, what it served, and why calls ran eagerly."""
        return self.graph_call.report()

    def verify(self, *, tolerance: float | None = None, seed: int = 0) -> Verification:
        """Every graph against the eager function; raises VerifyError where they disagree."""
        return self.graph_call.verify(tolerance=tolerance, seed=seed)

    def check_addresses(self) -> None:
        """Raise AddressError if a parameter or buffer has moved since the capture."""
        self.graph_call.check_addresses()


class GraphedFunction(_GraphControls):
    """A function served from graphs."""

    def __init__(self, call: GraphedCall) -> None:
        self.graph_call = call
        functools.update_wrapper(self, call.function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.graph_call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "graph_call":
            raise AttributeError(name)
        return getattr(self.graph_call.function, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GraphedFunction":
        return GraphedFunction(self.graph_call.for_copy(copy.deepcopy(self.unwrap(), memo)))


def wrap_module(module: torch.nn.Module, call: GraphedCall) -> "GraphedModule":
    """The wrapper of a module; containers stay containers (`len`, indexing, iteration)."""
    wrapped: Any = type(module)
    return _wrapper_class(wrapped)(module, call)


@functools.cache
def _wrapper_class(wrapped: Any) -> "type[GraphedModule]":
    special = [name for name in dir(wrapped) if name.startswith("__") and not hasattr(torch.nn.Module, name)]
    methods = {name: _forwarded(name) for name in special if callable(getattr(wrapped, name))}
    return type(GraphedModule.__name__, (GraphedModule,), methods)


def _forwarded(name: str) -> Callable[..., Any]:
    """Python looks special methods up on the type, where `__getattr__` is not asked."""
    return lambda self, *args: getattr(self.unwrap(), name)(*args)


class GraphedModule(_GraphControls, torch.nn.Module):
    """A module served from graphs.

    It shares the wrapped module's tables of parameters, buffers and submodules, so `state_dict`, `to`,
    `named_parameters` and a place inside another module work as if the wrapper were not there. Everything
    else is looked up on, and set on, the wrapped module.
    """

    def __init__(self, module: torch.nn.Module, call: GraphedCall) -> None:
        tables = {
            name: value
            for name, value in vars(module).items()
            if name.startswith("_") and isinstance(value, dict | set)
        }
        vars(self).update(tables, graph_call=call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.graph_call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.graph_call.function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.graph_call.function, name, value)
        if isinstance(value, torch.Tensor | torch.nn.Module):
            self.graph_call.addresses_may_have_moved()

    def __delattr__(self, name: str) -> None:
        delattr(self.graph_call.function, name)
        self.graph_call.addresses_may_have_moved()

    def __deepcopy__(self, memo: dict[int, Any]) -> "GraphedModule":
        module = copy.deepcopy(self.unwrap(), memo)
        return wrap_module(module, self.graph_call.for_copy(module))

    def __repr__(self) -> str:
        return f"graphed({self.graph_call.function!r})"

    def extra_repr(self) -> str:
        """The wrapped module's."""
        return self.unwrap().extra_repr()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's, without graphs."""
        return self.unwrap().forward(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # .to(), .half(), .cuda(): parameters may move
        self.graph_call.addresses_may_have_moved()
        return result

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # Loading a parent comes through here as well; with assign=True parameters are replaced.
        self.unwrap()._load_from_state_dict(*args, **kwargs)
        self.graph_call.addresses_may_have_moved()
