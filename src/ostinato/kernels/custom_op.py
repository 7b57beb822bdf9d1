"""Registers a kernel's function as a custom op of torch.

`torch.library.custom_op` does the same and adds autograd wrappers that inference has no use for: they cost
some 50 microseconds of CPU a call, which is much of the time of a capture, and importing what they need
(dynamo, sympy) takes seconds of every start. Here a function is registered as it is, for all devices.

Where nobody watches, a call does not even go through torch's dispatcher, which takes some 6 microseconds and
which a capture of all graphs would pass twenty thousand times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_LIBRARY = torch.library.Library("ostinato", "DEF")


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, str, torch.dtype})
"""Arguments of these types would be handed over as they are: no tensor with a dispatch of its own."""


class CustomOp(Generic[P, R]):
    """A registered op; call it like the function."""

    def __init__(self, name: str, function: Callable[P, R], mutates_args: tuple[str, ...]) -> None:
        self.name = name
        self.__doc__ = function.__doc__
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        self._function = function
        self._dispatched: Any = getattr(torch.ops.ostinato, name).default

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        types = map(type, (*args, *kwargs.values()) if kwargs else args)
        if _is_watched() or not _PLAIN.issuperset(types):
            result: R = self._dispatched(*args, **kwargs)
            return result
        return self._function(*args, **kwargs)

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What the op returns for tensors without data, for torch.compile."""
        torch.library.register_fake(f"ostinato::{self.name}", function, lib=_LIBRARY)
        return function


_is_compiling = torch.compiler.is_compiling
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_num_function_modes = torch._C._len_torch_function_stack
_innermost_transform = torch._C._functorch.peek_interpreter_stack


def _is_watched() -> bool:
    """Whether torch.compile, a mode or a transform wants to see the ops that are called."""
    return bool(
        _is_compiling()
        or _num_dispatch_modes()
        or _num_function_modes()
        or _innermost_transform() is not None
    )


def custom_op(name: str, *, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[P, R]], CustomOp[P, R]]:
    """Register the decorated function as `ostinato::name`.

    Its annotations make the schema. Outputs must not share memory with inputs or with each other.
    """
    return lambda function: CustomOp(name, function, mutates_args)
